#!/usr/bin/env bash
# The GPU figures of docs/results.md, most wanted first. What OUT holds already is left out, so it may be cut off and called again.
#
#   python -m scripts.bench gpu_all OUT [one|two|four]    how many GPUs. Two: steps that need both, then one lane of the others on each.
#                                                     Four: two lanes of the former, one step on all, four lanes of the others.
#                                                     No network.
#
# PYTHON (default python3) must have torch, SGLang, transformers, this project's other requirements and pytest. OUT/progress says when
# which step ended, OUT/done that all did.
set -uo pipefail
out=${1:?usage: python -m scripts.bench gpu_all OUT [one|two|four]}
gpus=${2:-one}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/gpu_env.sh
source scripts/gpu_env.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

triton='{"attention-backend":"triton"}' # boots without FlashAttention-3
small='{"mem-fraction-static":0.2,"max-total-tokens":100000}'

bench() { # bench FOLDER SECONDS ARGUMENTS...
    local folder=$1 seconds=$2
    shift 2
    local status=0
    "$PYTHON" -m scripts.bench gpu_bench "$@" --out "$out/$folder" --budget-s "$seconds" >>"$out/$folder.log" 2>&1 || status=$?
    echo "$(date +%T) $folder: $1 ended with $status" >>"$out/progress"
}

on() { # on GPUS COMMAND ARGUMENTS...: with these GPUs alone, which are 0, 1, ... to it
    local CUDA_VISIBLE_DEVICES=$1
    shift
    export CUDA_VISIBLE_DEVICES
    "$@"
}

transfer() { # two GPUs: versions by nccl, and what asynchrony gains
    bench nccl 260 nccl --updates 8 --loads idle in_place
    bench async 900 e2e --train-steps 24
}

runs() { # two GPUs: whole runs of other kinds
    bench lost 560 lost --train-steps 24
    bench exact 260 exact --train-steps 5 --new-tokens 128
}

parallel() {
    bench parallel 420 parallel --train-steps 6
}

large() {
    bench nccl-4b 260 nccl --shape 4b --loads idle --concurrent 8 --max-running 64 --server-args "$triton"
}

recipes() {
    bench recipes 420 recipes --train-steps 5
}

serving() { # what one engine does
    bench serving 420 ipc boundary throughput --kinds bare worker router --requests 1536
}

conformance() {
    bench conformance 330 conformance --server-args "$small"
}

tuning() {
    bench tuning 300 tuning --variants ungathered fa3 delayer-250 delayer-500
}

settings() {
    conformance
    tuning
}

colocate() {
    bench colocate 480 colocate --train-steps 9 --server-args "$triton"
}

repeated() { # the same run twice, to the last bit
    bench repeat 240 repeat --train-steps 4 --new-tokens 128
}

second_pair() {
    runs
    recipes
}

case $gpus in
four)
    on 0,1 transfer &
    on 2,3 second_pair &
    wait
    parallel
    on 0 serving &
    on 1 conformance &
    on 2 tuning &
    on 3 colocate &
    wait
    on 0,1 large
    on 0 repeated
    ;;
two)
    transfer
    runs
    parallel
    large
    on 0 serving &
    on 1 settings &
    wait
    recipes
    colocate
    repeated
    ;;
one)
    serving
    settings
    colocate
    repeated
    ;;
*)
    echo "how many GPUs: one, two or four, not $gpus" >&2
    exit 2
    ;;
esac
touch "$out/done"
