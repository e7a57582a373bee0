#!/usr/bin/env bash
# Sets everything up in .venv and runs lint, types and tests; types beside the tests, their findings at the end. Arguments go to
# pytest, e.g. tests/bus -k trim, or --all: also the tests marked slow, which take some ten minutes more (the crash matrix has a
# script of its own: crash_matrix.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
prepare "[test]"
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, and each would compile our packages anew
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy >.venv/types.txt 2>&1 &
types=$!
trap 'kill $types 2>/dev/null || true' EXIT
status=0
# Two workers more than processors: whole runs and actors wait for each other a good part of their time.
.venv/bin/python -m pytest -q -n "$(($(getconf _NPROCESSORS_ONLN) + 2))" --dist worksteal "$@" || status=$?
wait $types || status=$?
cat .venv/types.txt
exit $status
