#!/usr/bin/env bash
# Sets everything up in .venv and runs the crash matrix, over hosts too where they can be made (root), six cases at a time, four
# of them over hosts; with MILES_ASYNC_CRASH=all also all variants of its cases. Arguments go to pytest, e.g. -k redis
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
prepare "[test]"
export MILES_ASYNC_CRASH=${MILES_ASYNC_CRASH:-matrix} OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q -n 6 --dist worksteal tests/crash tests/hosts "$@"
