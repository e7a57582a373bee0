#!/usr/bin/env bash
# The Megatron backend on one GPU: speed, losses beside the torch backend's, a resumed run. About six minutes, no network.
#
#   scripts/gpu_megatron_smoke.sh OUT [flags of gpu_megatron.py]
#
# PYTHON (default python3) must have torch, megatron-core, Transformer Engine, transformers and this project's other requirements.
set -euo pipefail
out=${1:?usage: scripts/gpu_megatron_smoke.sh OUT [flags]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/gpu_env.sh
source scripts/gpu_env.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" scripts/gpu_megatron.py --out "$out" "$@" 2>&1 | tee "$out/megatron.log"
