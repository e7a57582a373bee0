#!/usr/bin/env bash
# Sets everything up in .venv and runs lint, types and all tests. Arguments go to pytest, e.g. tests/bus -k trim
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
prepare "[test]"
.venv/bin/ruff check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -q -n auto --dist worksteal "$@"
