"""What gpu_tails.py reads: figures of one run from its metrics.jsonl and the server's log, and the model's beside them."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.history import History, Step, history_of
from actors.runtime.staleness import Rule
from actors.trainer.spread import LENGTH, PACE, QUANTILES, RUNNING, SECONDS
from miles_async.console.whatif.advice import Choice, predict
from miles_async.console.whatif.observed import Observed, observe, slowdown_of
from scripts.bench import gpu_e2e

DECODE = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] .*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")
QUEUED = re.compile(r"#queue-req: (\d+)")
BIN = 32  # requests of one bar of the histogram


def stop_ids(mean: float, most: int, vocab: int) -> list[int]:
    """As many token ids as end answers of random weights at `mean` tokens when they are cut at `most`: every token of a random
    model is about as likely (logits spread by 0.64 and do not depend on the token)."""
    low, high = 1.0, 1e6
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-most / middle) < mean else (low, middle)
    return sorted(random.Random(0).sample(range(vocab // 8, vocab), max(1, round(vocab / low))))


def figures(metrics: Path, *, warm: int, steps: int) -> dict[str, Any]:
    """Of at most `steps` steps after the first `warm`; {} where there are fewer than three of them.

    `masked`: share of the response tokens of these steps' batches that had no gradient, for whatever reason; `dropped`: groups
    by reason over these steps; `ledger`: tokens by account over the whole run, where it ended by itself."""
    rows = gpu_e2e.rows_of(metrics)
    done = [row for row in rows if row["kind"] == "step"]
    if len(done) < warm + 3:
        return {}
    late, walls = done[warm : warm + steps], [row["wall"] for row in done[warm - 1 : warm + steps]]
    read = [row["metrics"] for row in late]
    span = walls[-1] - walls[0]
    asked = [m.get("rollout/tokens", 0.0) for m in read]
    trained = sum(m.get("train/trained_tokens", 0.0) for m in read)

    def mean(name: str) -> float | None:
        found = [m[name] for m in read if name in m]
        return round(statistics.mean(found), 4) if found else None

    active = [row for row in rows if row["kind"] == "activated"]
    ledgers = [row["accounts"] for row in rows if row["kind"] == "ledger"]
    gone = Counter(row["reason"] for row in rows if row["kind"] == "drop" and walls[0] < row["wall"] <= walls[-1])
    return {
        "steps": len(late),
        "step_s": round(span / len(late), 4),
        "median_step_s": round(statistics.median(b - a for a, b in itertools.pairwise(walls)), 4),
        "tokens_per_s": round(trained / span, 1),
        "tokens_per_s_before_mask": round(sum(asked) / span, 1) if all(asked) else None,
        "masked": round(1 - trained / sum(asked), 5) if all(asked) else None,
        "dropped": dict(gone),
        "train_s": mean("perf/train_s"),
        "wait_s": mean("perf/wait_s"),
        "compile_s": {r["step"]: round(s, 2) for r in done if (s := r["metrics"].get("train/compile_s"))},
        "trainer_busy": round(1 - sum(m.get("perf/wait_s", 0.0) for m in read) / span, 4),
        "staleness": mean("train/staleness") or mean("rollout/fully_async/avg_staleness"),
        "staleness_max": max(m.get("train/staleness_max", 0.0) for m in read),
        "logprob_difference": max(m.get("train/train_rollout_logprob_abs_diff", 0.0) for m in read),
        "response_tokens_mean": mean("rollout/response_len/mean"),
        "truncated": mean("rollout/truncated_ratio"),
        "response_tokens": {f"p{q}": mean(f"{LENGTH}/p{q}") for q in QUANTILES if mean(f"{LENGTH}/p{q}") is not None},
        "generate_s_mean": mean(f"{SECONDS}/mean"),
        "running_by_samples": mean(f"{RUNNING}/mean"),
        "token_s": mean(f"{PACE}/mean"),
        "pause_s": round(statistics.median([r["pause_s"] for r in active[1:]] or [0]), 4),
        "transports": sorted({str(r.get("transport")) for r in active}),
        "requests": dict(Counter(str(r.get("requests")) for r in active)),
        "slots": [[round(r["wall"] - walls[0], 1), r["slots"], r["why"]] for r in rows if r["kind"] == "slots"],
        "faults": [f"{r['actor']}: {r['event']}: {r['text'][:160]}" for r in rows if r["kind"] == "fault"][:8],
        "ledger": ledgers[-1] if ledgers else None,
        "walls": [round(wall - walls[0], 3) for wall in walls],
        "window": [walls[0], walls[-1]],
    }  # fmt: skip


def running(logs: Sequence[Path | None], window: Sequence[float]) -> dict[str, Any]:
    """Requests at once within a window of wall time, by what the servers wrote; of several together, with `engines`: each."""
    each = [found for log in logs if (found := _running(log, window))]
    if len(each) < 2:
        return each[0] if each else {}
    return {key: round(sum(one[key] for one in each), 1) for key in ("mean", "engine_tokens_per_s")} | {"engines": each}


def _running(log: Path | None, window: Sequence[float]) -> dict[str, Any]:
    """Of one server, by its own lines (one per 40 decode steps, whole seconds); {} where it writes none. `series`: seconds since
    the window's begin, running, waiting, tokens/s, thinned to 120 points."""
    if log is None or not log.exists():
        return {}
    seen: list[tuple[float, int, int, float]] = []
    for line in log.read_text(errors="replace").splitlines():
        if "Decode batch" not in line or (found := DECODE.match(line)) is None:
            continue
        wall = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))
        if window[0] <= wall <= window[1]:
            queued = QUEUED.search(line)
            seen.append((wall - window[0], int(found[2]), int(queued[1]) if queued else 0, float(found[3])))
    if not seen:
        return {}
    # A line stands for 40 steps of decoding: its weight in time is its number of tokens over its speed.
    seconds = [40 * n / speed if speed else 0.0 for _, n, _, speed in seen]
    total = sum(seconds) or 1.0
    bars: Counter[int] = Counter()
    for (_, n, _, _), s in zip(seen, seconds, strict=True):
        bars[n // BIN * BIN] += s
    thin = max(1, len(seen) // 120)
    return {
        "lines": len(seen),
        "mean": round(sum(n * s for (_, n, _, _), s in zip(seen, seconds, strict=True)) / total, 1),
        "least": min(n for _, n, _, _ in seen),
        "most": max(n for _, n, _, _ in seen),
        "waiting_mean": round(statistics.mean(q for _, _, q, _ in seen), 1),
        "engine_tokens_per_s": round(sum(n * 40 for _, n, _, _ in seen) / total, 1),
        "share_of_time_by_running": {f"{low}-{low + BIN - 1}": round(s / total, 4) for low, s in sorted(bars.items())},
        "series": [[round(at, 1), n, q, round(speed)] for at, n, q, speed in seen[::thin]],
    }


def seen_by_model(metrics: Path, *, slots: int, warm: int, steps: int) -> tuple[Observed, list[Step]] | None:
    """What the model takes from the same steps of a run; None where they tell too little (another commit's)."""
    history = history_of(gpu_e2e.rows_of(metrics))
    late = History(**{name: getattr(history, name) for name in history.__slots__} | {"steps": history.steps[warm : warm + steps]})
    seen = observe(late, slots=slots)
    return None if seen is None else (seen, late.steps)


def model(
    runs: dict[str, dict[str, Any]],
    read: dict[str, tuple[Observed, list[Step]] | None],
    setups: dict[str, tuple[Rule, int, int]],
    slots: int,
    reference: str,
) -> dict[str, Any]:
    """Seconds a step, requests running and masked share by miles_async/console/whatif, each beside the measured one.

    Every run's trainer time is its own; how requests slow each other is fitted on all runs together. `own`: lengths and pace of
    the run itself; `from_<reference>`: lengths and pace seen in that run (what the bar means by engine speed). `setups`: rule,
    bound and groups in generation at most (0 = what the bound admits) by name."""
    told = {name: found for name, found in read.items() if found is not None}
    if not told:
        return {}
    slow = slowdown_of([step for _, steps in told.values() for step in steps])
    base = reference if reference in told else next(iter(told))
    found: dict[str, Any] = {"slowdown": slow, "reference": base}
    for name, run in runs.items():
        rule, bound, cap = setups[name]
        at_once = _mean_slots(run, slots)
        train_s = run["step_s"] - (run["wait_s"] or 0.0)
        entry: dict[str, Any] = {"slots": at_once, "train_s": round(train_s, 3)}
        for label, source in (("own", name), (f"from_{base}", base)):
            if source in told:
                seen = msgspec.structs.replace(told[source][0], train_s=train_s, slowdown=slow or told[source][0].slowdown)
                entry[label] = _beside(predict(seen, rule, bound, at_once, cap=cap), run)
        found[name] = entry
    return found


def _mean_slots(run: dict[str, Any], slots: int) -> int:
    """Over the window, of a run that changes them."""
    if not run.get("slots"):
        return slots
    end = run["walls"][-1]
    times, values = [at for at, _, _ in run["slots"]], [n for _, n, _ in run["slots"]]
    at_start = values[max(0, bisect_right(times, 0.0) - 1)]
    points = [(0.0, at_start), *((at, n) for at, n in zip(times, values, strict=True) if 0 < at < end), (end, 0)]
    return round(sum((b - a) * n for (a, n), (b, _) in itertools.pairwise(points)) / end)


def _beside(choice: Choice, run: dict[str, Any]) -> dict[str, float | None]:
    measured = run.get("running", {}).get("mean") or run.get("running_by_samples")
    return {
        "step_s": round(choice.step_s, 3),
        "step_s_off": round(choice.step_s / run["step_s"] - 1, 4),
        "running": round(choice.running, 1),
        "running_off": round(choice.running / measured - 1, 4) if measured else None,
        "masked": round(choice.masked, 5),
        "split": round(choice.split, 4),
    }


def held_out(metrics: Path, target: float) -> dict[str, Any]:
    """A learning curve: seconds from the first active version until the evaluated one was made, its step, held-out share; and
    when `target` was first reached, by straight lines between evaluations."""
    rows = gpu_e2e.rows_of(metrics)
    begin = next((row["wall"] for row in rows if row["kind"] == "activated"), None)
    if begin is None:
        return {}
    made = {0: begin} | {row["step"]: row["wall"] for row in rows if row["kind"] == "step"}
    scores: dict[int, float] = {}
    for row in rows:
        if row["kind"] == "eval" and row["metrics"]:
            scores.setdefault(row["step"], _score(row["metrics"]))  # the last step may be evaluated twice
    curve = [[round(made.get(step, begin) - begin, 2), step, round(score, 4)] for step, score in sorted(scores.items())]
    reached = next((_crossing(a, b, target) for a, b in itertools.pairwise([[0.0, 0, 0.0], *curve]) if b[2] >= target), None)
    steps = [row for row in rows if row["kind"] == "step"]

    def mean(name: str) -> float | None:
        return round(statistics.mean(row["metrics"].get(name, 0.0) for row in steps), 5) if steps else None

    return {
        "curve": curve,
        "reached_s": reached and round(reached[0], 2),
        "reached_step": reached and round(reached[1], 1),
        "final": curve[-1][2] if curve else None,
        "steps": len(steps),
        "seconds": round(steps[-1]["wall"] - begin, 2) if steps else None,
        "wait_s": mean("perf/wait_s"),
        "train_s": mean("perf/train_s"),
        "masked": mean("rollout/masked_fraction"),
        "staleness": mean("train/staleness"),
    }


def _score(metrics: dict[str, float]) -> float:
    """The evaluation's mean reward: the entry whose name has but the data set's after eval/."""
    return next((float(v) for k, v in metrics.items() if k.count("/") == 1), 0.0)


def _crossing(a: list[Any], b: list[Any], target: float) -> tuple[float, float]:
    part = (target - a[2]) / (b[2] - a[2]) if b[2] > a[2] else 1.0
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])
