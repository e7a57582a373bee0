#!/usr/bin/env bash
# Sets everything up in .venv and runs the quickstart. Arguments go to `miles-async quickstart`, e.g. --num-rollout 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/lib.sh
source scripts/lib.sh
prepare ""
exec .venv/bin/miles-async quickstart "$@"
