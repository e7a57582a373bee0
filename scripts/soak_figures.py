"""The figures of a soak, over all its pieces, and the table of them (pure, over what the home holds)."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import msgspec

from bus import ledger
from bus.messages.policy import Restored, StepDone
from scripts import growth
from scripts.soak_home import Home


def figures(
    home: Home, found: ledger.LedgerCheck, policy: Sequence[Any], steps: dict[int, StepDone], issued: int, settled_s: float
) -> dict[str, Any]:
    """`steps`: of the surviving lineage; `policy`: every message."""
    all_steps = [m for m in policy if isinstance(m, StepDone)]
    by_kind = _disturbances(home, all_steps)
    pieces = home.lines("began", "ended")
    return {
        "pieces": pieces,
        "minutes": round(sum(p["minutes"] for p in pieces if p["kind"] == "ended"), 1),
        "steps": len(steps),
        "steps_trained_again": len(all_steps) - len(steps),
        "samples_trained_again": sum(len(m.samples) for m in all_steps) - sum(len(m.samples) for m in steps.values()),
        "restores": sum(isinstance(m, Restored) for m in policy),
        "disturbances": sum(row["times"] for row in by_kind.values()),
        "kills_survived": sum(row["times"] for kind, row in by_kind.items() if kind.startswith("kill")),
        "by_kind": by_kind,
        "ledger_checks": len(home.lines("checked")),
        "lives_asked": sum(line["samples"] for line in home.lines("traced")),
        "groups_issued": issued,
        "ledger": found.text(),
        "accounts": msgspec.to_builtins(found.accounts),
        "letters": [line["text"] for line in home.lines("letter")],
        "growth": [row._asdict() for row in growth.slopes(home.lines("measured"), settled_s)],
        "faults": [f"piece {line['piece']}: {line['text']}" for line in home.lines("fault")],
    }


def _disturbances(home: Home, all_steps: Sequence[StepDone]) -> dict[str, dict[str, Any]]:
    """By kind, of all pieces. Seconds between two steps of a piece above the median are given to the last disturbance before
    the later one."""
    lines = sorted(home.lines("disturbed"), key=lambda line: line["at"])
    ats, idle = [line["at"] for line in lines], [0.0] * len(lines)
    begun = [line["wall"] for line in home.lines("began")]
    walls = sorted(m.wall for m in all_steps)
    gaps = [(a, b) for a, b in itertools.pairwise(walls) if bisect(begun, a) == bisect(begun, b)]
    usual = statistics.median(b - a for a, b in gaps) if gaps else 0.0
    for a, b in gaps:
        if b - a > usual and (before := bisect(ats, b)):
            idle[before - 1] += b - a - usual
    found: dict[str, dict[str, Any]] = {}
    for line, seconds in zip(lines, idle, strict=True):
        row = found.setdefault(line["what"], {"times": 0, "samples_redone": 0, "tokens_regenerated_at_most": 0, "idle_s": 0.0})
        row["times"] += 1
        row["samples_redone"] += line["samples"]
        row["tokens_regenerated_at_most"] += line["tokens"]
        row["idle_s"] += seconds
    for row in found.values():
        row["trainer_idle_s_each"] = round(row.pop("idle_s") / row["times"], 2)
    return dict(sorted(found.items()))


def table(found: dict[str, Any]) -> str:
    """The result as lines of Markdown."""
    lines = [
        "| what | times | samples re-done | tokens re-generated, at most | trainer idle caused, s each |",
        "|---|---|---|---|---|",
    ]
    for kind, row in found["by_kind"].items():
        lines.append(
            f"| {kind} | {row['times']} | {row['samples_redone']} | {row['tokens_regenerated_at_most']} "
            f"| {row['trainer_idle_s_each']} |"
        )
    lines.append("")
    lines.append(
        f"{found['kills_survived']} kills survived in {found['minutes']:g} min; {found['steps']} steps, "
        f"{found['steps_trained_again']} trained again ({found['samples_trained_again']} samples); "
        f"{found['disturbances']} disturbances; {found['ledger_checks']} ledger checks, {found['lives_asked']} lives asked. "
        f"{found['ledger']}"
    )
    return "\n".join(lines)
