#!/usr/bin/env bash
# A tiny model that reads pictures, end to end on a GPU: SGLang looks and generates, the torch trainer learns. A few minutes, no network.
#
#   python -m scripts.bench gpu_pictures OUT [miles-async train flags]
#
# PYTHON (default python3) must have torch, torchvision, Pillow, SGLang, transformers and this project's other requirements.
# Prints, step by step, the mean difference of log-probs between engine and trainer, and the reward.
# Exit 1 where that difference is more than bfloat16 explains.
set -euo pipefail
out=${1:?usage: python -m scripts.bench gpu_pictures OUT [flags]}
shift
mkdir -p "$out/model"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/gpu_env.sh
source scripts/gpu_env.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" - "$out" <<'PY'
import sys
from pathlib import Path

from scripts.bench import sights

out = Path(sys.argv[1])
sights.make_model(out / "model")
sights.write_rows(out / "rows.jsonl", 24)
PY
status=0
timeout "${SMOKE_DEADLINE_S:-540}" "$PYTHON" -m miles_async train --hf-checkpoint "$out/model" --name pictures --runs-dir "$out/runs" \
    --prompt-data "$out/rows.jsonl" --label-key label --apply-chat-template --multimodal-keys '{"image": "images"}' --rm-type contains \
    --num-rollout "${SMOKE_STEPS:-12}" --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 2 --lr 0.003 \
    --console plain --no-report --num-generation-workers 1 --engine sglang --rollout-gpu-ids 0 --sglang-attention-backend triton \
    --sglang-mm-attention-backend triton_attn --sglang-sampling-backend pytorch --sglang-mem-fraction-static 0.3 --sglang-cuda-graph-max-bs 64 --sglang-dtype bfloat16 "$@" \
    2>&1 | tee "$out/pictures.log" || status=$?
"$PYTHON" - "$out/runs/pictures/metrics.jsonl" <<'PY' || status=1
import json, sys

BOUND = 0.05  # bfloat16 on both sides gave 0.004; a tower that sees with older weights 0.27 and more
above, seen = [], 0
for line in open(sys.argv[1]):
    row = json.loads(line)
    if row["kind"] == "step":
        shown = ("train/train_rollout_logprob_abs_diff", "rollout/raw_reward")
        print(row["step"], {name: row["metrics"].get(name) for name in shown})
        seen += 1
        if not row["metrics"].get(shown[0], float("nan")) <= BOUND:  # also one that is missing
            above.append(row["step"])
if not seen:
    sys.exit("no step was trained")
if above:
    sys.exit(f"log-probs of engine and trainer differ by more than {BOUND}, or are not told, at steps {above}")
PY
exit "$status"
