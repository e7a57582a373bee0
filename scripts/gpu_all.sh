#!/usr/bin/env bash
# The GPU figures of docs/results.md, most wanted first. What OUT holds already is left out, so it may be cut off and called again.
#
#   scripts/gpu_all.sh OUT [one|two]     two: steps that need two GPUs, then one lane of the others on each. No network.
#
# PYTHON (default python3) must have torch, SGLang, transformers, this project's other requirements and pytest. OUT/progress says when
# which step ended, OUT/done that all did.
set -uo pipefail
out=${1:?usage: scripts/gpu_all.sh OUT [one|two]}
gpus=${2:-one}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/gpu_env.sh
source scripts/gpu_env.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

triton='{"attention-backend":"triton"}' # boots without FlashAttention-3
small='{"mem-fraction-static":0.2,"max-total-tokens":100000}'

bench() { # bench FOLDER SECONDS ARGUMENTS...
    local folder=$1 seconds=$2
    shift 2
    local status=0
    "$PYTHON" scripts/gpu_bench.py "$@" --out "$out/$folder" --budget-s "$seconds" >>"$out/$folder.log" 2>&1 || status=$?
    echo "$(date +%T) $folder: $1 ended with $status" >>"$out/progress"
}

serving() { # serving GPU: what one engine does
    bench serving 420 ipc boundary throughput --gpu "$1" --kinds bare worker router --requests 1536
}

settings() { # settings GPU: the conformance suite, and one by one
    bench conformance 330 conformance --gpu "$1" --server-args "$small"
    bench tuning 300 tuning --gpu "$1" --variants ungathered fa3 delayer-250 delayer-500
}

if [ "$gpus" = two ]; then
    bench nccl 260 nccl --updates 8 --loads idle in_place
    bench async 620 e2e --train-steps 24
    bench lost 560 lost --train-steps 24
    bench exact 260 exact --train-steps 5 --new-tokens 128
    bench nccl-4b 260 nccl --shape 4b --loads idle --concurrent 8 --max-running 64 --server-args "$triton"
    serving 0 &
    settings 1 &
    wait
    bench recipes 420 recipes --train-steps 5
else
    serving 0
    settings 0
fi
bench colocate 480 colocate --train-steps 9 --server-args "$triton"
touch "$out/done"
