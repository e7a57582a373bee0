#!/usr/bin/env bash
# The quickstart task (SMOKE_CONFIG=lora: with adapters) end to end on a GPU, about four minutes, no network: SGLang
# generates, the torch trainer learns.
#
#   scripts/gpu_smoke.sh OUT [miles-async train flags]
#
# PYTHON (default python3) must have torch, SGLang, transformers and this project's other requirements.
# OUT gets smoke.json (exit status, seconds, the run's last metrics) and the logs; the run itself lies under OUT/runs.
set -euo pipefail
out=${1:?usage: scripts/gpu_smoke.sh OUT [flags]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/gpu_env.sh
source scripts/gpu_env.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

name=${SMOKE_NAME:-gpu-smoke}
# The tiny model's heads are too small for most attention kernels; Triton's take any size.
server=(
    --engine sglang
    --rollout-gpu-ids 0
    --sglang-attention-backend triton
    --sglang-sampling-backend pytorch
    --sglang-mem-fraction-static 0.3
    --sglang-cuda-graph-max-bs 64
    --sglang-dtype bfloat16
)
began=$(date +%s)
status=0
timeout "${SMOKE_DEADLINE_S:-540}" "$PYTHON" -m miles_async train "configs/${SMOKE_CONFIG:-quickstart}.toml" --name "$name" --runs-dir "$out/runs" \
    --console plain --no-report --num-rollout "${SMOKE_STEPS:-30}" --num-generation-workers 1 --use-router \
    "${server[@]}" "$@" 2>&1 | tee "$out/smoke.log" || status=$?
"$PYTHON" - "$out" "$name" "$status" "$(($(date +%s) - began))" <<'PY'
import json, sys
from pathlib import Path

out, name, status, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
run = out / "runs" / name
rows = []
for file in sorted(run.glob("metrics*.jsonl")):
    rows += [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
boots = [json.loads(file.read_text()) for file in sorted(run.glob("engines/*/boot.*/attempt.json"))]
result = {
    "exit_status": status,
    "seconds": seconds,
    "rows": len(rows),
    "first": rows[:1],
    "last": rows[-3:],
    "boots": [{key: boot.get(key) for key in ("outcome", "kind", "cause", "seconds", "degraded", "versions")} for boot in boots],
}
(out / "smoke.json").write_text(json.dumps(result, indent=2))
print(json.dumps(result)[:2000])
PY
exit "$status"
