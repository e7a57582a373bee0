"""runs/<name>/report.html: what a run did, on one page without network or scripts.

Reads  metrics.jsonl and settings.toml of the run    Owns  report.html, replaced by rename
"""

from __future__ import annotations

import os
import platform
import sys
import tomllib
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from actors.recorder.file import read_records
from actors.recorder.history import MAX_STALENESS, REWARD, History, history_of
from bus.errors import InvariantBroken, printable
from bus.ledger import Accounts, accounts_of
from miles_async.console import charts
from miles_async.console.figures import TRAINER, shares, throughput
from miles_async.console.schedule.advice import advise, share
from miles_async.console.shadow.results import notes as shadow_notes
from miles_async.console.text import duration, human_count, percent, plural

FILE = "report.html"
PACKAGES = ("miles-async", "torch", "transformers", "tokenizers", "safetensors", "numpy", "redis", "msgspec", "uvloop",
            "sglang", "sglang-router", "megatron-core", "ray")  # fmt: skip
SHOWN_SAMPLES = 12
STALENESS_KNOB = "max_weight_staleness"


def write_report(run_dir: Path) -> Path:
    """Make the report of a run from what it left in its folder; works during the run and after any end of it."""
    history = history_of(read_records(run_dir))
    settings = read_settings(run_dir)
    page = render(run_dir.name, history, settings, notes=shadow_notes(run_dir))
    path = run_dir / FILE
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(page, "utf-8")
    fresh.replace(path)
    return path


def read_settings(run_dir: Path) -> dict[str, dict[str, Any]]:
    """settings.toml as tables; empty when it is not there."""
    try:
        found = tomllib.loads((run_dir / "settings.toml").read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}
    return {name: dict(table) for name, table in found.items() if isinstance(table, dict)}


def render(name: str, history: History, settings: dict[str, dict[str, Any]], *, notes: Sequence[str] = ()) -> str:
    """The whole page. `notes`: lines of others, at the top."""
    css = (Path(__file__).parent / "report.css").read_text("utf-8")
    accounts = _accounts(history)
    body = "\n".join(
        [
            _header(name, history),
            _notes(history, accounts, notes),
            _tiles(history, accounts),
            '<div class="grid">',
            *_charts(history, settings, accounts),
            _trainer(history),
            _samples(history),
            _ledger(accounts),
            _events(history),
            _settings(settings),
            "</div>",
            _footer(),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}: run report</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def _accounts(history: History) -> Accounts | None:
    try:
        return accounts_of(history.ledger) if history.ledger else None
    except InvariantBroken:
        return None  # written by another release


def _header(name: str, history: History) -> str:
    if not history.first_wall:
        return f"<header><h1>{escape(name)}</h1><p>No step, evaluation or event is on record yet.</p></header>"
    began = datetime.fromtimestamp(history.first_wall).strftime("%Y-%m-%d %H:%M")
    took = duration(history.last_wall - history.first_wall)
    end = "finished" if history.finished else "not finished"
    steps = history.steps[-1].step if history.steps else 0
    return f"<header><h1>{escape(name)}</h1><p>{steps} steps in {took}, started {began}, {end}</p></header>"


def _notes(history: History, accounts: Accounts | None, others: Sequence[str]) -> str:
    notes: list[tuple[str, str]] = [("", text) for text in others]
    if history.lost_steps:
        times = plural(len(history.restores) - 1, "restart")
        notes.append(("", f"{plural(history.lost_steps, 'step')} lost with the trainer and done again ({times})."))
    for name, failed in history.failed_evals.items():
        notes.append(("bad", f"The evaluation {name} at step {failed['step']} failed: {failed['error']}"))
    if history.dead:
        notes.append(("bad", f"{len(history.dead)} entries became dead letters; the last: {history.dead[-1]['error']}"))
    if accounts is not None and accounts.pending < 0:
        notes.append(("bad", f"The ledger does not close: {accounts.pending} samples pending."))
    return "\n".join(f'<p class="note {kind}">{escape(text)}</p>' for kind, text in notes)


def _tiles(history: History, accounts: Accounts | None) -> str:
    tiles: list[tuple[str, str]] = []
    for name in history.eval_names()[:2]:
        evals = history.evals_of(name)
        tiles.append((percent(evals[-1].score), f"{name}, from {percent(evals[0].score)}"))
    steps = history.steps
    if steps:
        recent = steps[-max(1, len(steps) // 10) :]
        tiles.append((f"{sum(s.get(REWARD) for s in recent) / len(recent):.3f}", "training reward, last tenth"))
        tiles.append((human_count(throughput(steps)), "tokens trained per second"))
        wait, _, _ = shares(steps)
        tiles.append((f"{wait:.0%}", "of the trainer's time waiting"))
        tiles.append((f"{max(s.get(MAX_STALENESS) for s in steps):.0f}", "largest staleness, versions"))
    if accounts is not None and accounts.issued:
        tiles.append((human_count(accounts.trained), f"of {human_count(accounts.issued)} samples trained"))
    if history.activations:
        typical = median(1000 * float(r["pause_s"]) for r in history.activations)
        tiles.append((f"{typical:.0f} ms", "median pause for a new version"))
    inner = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in tiles)
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _card(title: str, text: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2><p>{escape(text)}</p>\n{body}\n</section>"


def _charts(history: History, settings: dict[str, dict[str, Any]], accounts: Accounts | None) -> list[str]:
    cards: list[str] = []
    steps = history.steps
    if steps or history.evals:
        marks = "; dotted lines are knob changes" if any(int(k["epoch"]) > 0 for k in history.knobs) else ""
        marks += "; dashed red lines are restarts of the trainer" if len(history.restores) > 1 else ""
        text = f"Over training steps and over wall time{marks}."
        cards.append(_card("Learning", text, charts.learning(history), wide=True))
    if steps:
        wait, train, publish = shares(steps)
        split = f"Training {train:.0%}, waiting for rollouts {wait:.0%}, publishing and saving {publish:.0%}."
        rate = f"{human_count(throughput(steps))} response tokens per second overall."
        late = max(s.get(MAX_STALENESS) for s in steps)
        old = f"Versions between the weights that made a token and those trained; at most {late:.0f}."
        cards += [
            _card("Time of the trainer", split, charts.time_of_steps(history)),
            _card("Throughput", rate, charts.throughput(history)),
            _card("Staleness", old, charts.staleness(history, staleness_bounds(history, settings))),
            _card("Response length", _lengths_text(history), charts.lengths(history)),
        ]
    cards += _scheduling(history)
    if history.activations:
        cards.append(_card("Pauses of the engines", _pauses_text(history), charts.pauses(history)))
    by_reason, unit = _drops(history, accounts)
    if by_reason:
        total = sum(n for _, n in by_reason)
        of = f" of {accounts.issued:,} issued" if accounts is not None and unit == "samples" else ""
        cards.append(_card("Dropped", f"{total:,} {unit}{of}, by reason.", charts.drops(by_reason, unit)))
    return cards


def _scheduling(history: History) -> list[str]:
    """What the bound costs these lengths, and what others would."""
    advice = advise(history)
    if advice is None:
        return []
    picture = charts.spreads(history, advice.observed.bound or None)
    said = "".join(f"<p>{escape(line)}</p>" for line in advice.lines[:-1])
    rows = [
        [str(c.bound), f"{c.step_s:.3g}", f"{c.running:.0f}", share(c.masked), f"{c.split:.0%}"] for c in advice.choices
    ]
    table = _table(["bound", "s a step", "running", "tokens masked", "groups split"], rows, numbers=4)
    last = f"What the model of docs/scheduling.md gives for these lengths, {advice.choices[0].rule}, {advice.observed.slots} slots:"
    return [_card("Scheduling", advice.lines[-1], f"{said}{picture}<p>{escape(last)}</p>{table}", wide=True)]


def _lengths_text(history: History) -> str:
    cut = [s.get("rollout/truncated_ratio") for s in history.steps]
    return f"Tokens per response; {percent(cut[-1])} reached the limit in the last step."


def _pauses_text(history: History) -> str:
    waits = sorted(1000 * float(r["pause_s"]) for r in history.activations)
    whole = sorted(1000 * float(r["total_s"]) for r in history.activations)
    high = waits[min(len(waits) - 1, int(0.95 * len(waits)))]
    return (
        f"Generation stands still for {median(waits):.0f} ms (median), {high:.0f} ms (95 %); "
        f"with checks before it {median(whole):.0f} ms. {len(waits)} activations."
    )


def _drops(history: History, accounts: Accounts | None) -> tuple[list[tuple[str, int]], str]:
    if accounts is not None and accounts.dropped:
        return sorted(accounts.dropped.items(), key=lambda item: -item[1]), "samples"
    return history.drops.most_common(), "groups"


def staleness_bounds(history: History, settings: dict[str, dict[str, Any]]) -> list[tuple[int, int]]:
    """(from step, bound) in order: the setting, then each knob change at the first step after it."""
    rollout = settings.get("rollout", {})
    bounds: list[tuple[int, int]] = []
    if STALENESS_KNOB in rollout:
        bounds.append((0, int(rollout[STALENESS_KNOB])))
    for record in history.knobs:
        if STALENESS_KNOB in record["values"]:
            step = next((s.step for s in history.steps if s.wall >= float(record["wall"])), None)
            value = int(record["values"][STALENESS_KNOB])
            if step is not None and (not bounds or bounds[-1][1] != value):
                bounds.append((step if bounds else 0, value))
    return bounds


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int, last_is_sum: bool = False) -> str:
    """`numbers`: how many columns, from the right, are flush right."""
    first = len(head) - numbers
    kinds = ["" if i < first else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{k}>{escape(cell)}</th>" for k, cell in zip(kinds, head, strict=True))
    lines = []
    for number, row in enumerate(rows):
        total = ' class="sum"' if last_is_sum and number == len(rows) - 1 else ""
        lines.append(
            f"<tr{total}>" + "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kinds, row, strict=True)) + "</tr>"
        )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _trainer(history: History) -> str:
    """What the trainer said of its steps: where it began, where it is, and the extremes."""
    rows = []
    for name, key in TRAINER.items():
        values = [s.metrics[key] for s in history.steps if key in s.metrics]
        if values:
            recent = values[-max(1, len(values) // 10) :]
            cells = (values[0], sum(recent) / len(recent), min(values), max(values))
            rows.append([name, *(f"{value:.4g}" for value in cells)])
    if not rows:
        return ""
    return _card("Trainer", "", _table(["", "first step", "last tenth, mean", "least", "most"], rows, numbers=4))


def _samples(history: History) -> str:
    """Texts of a few samples over the run."""
    if not history.samples:
        return ""
    every = max(1, len(history.samples) // SHOWN_SAMPLES)
    body = "".join(
        f"<details><summary>step {r['step']}, reward {float(r['reward']):g}, {r['tokens']} tokens, {escape(str(r['sample']))}"
        f"</summary><pre>{escape(printable(str(r['prompt'])))}<b>{escape(printable(str(r['response'])))}</b></pre></details>"
        for r in history.samples[::-every][::-1]
    )
    return _card("Samples", "What the policy wrote, now and then; the response is bold.", body, wide=True)


def _ledger(accounts: Accounts | None) -> str:
    if accounts is None:
        return ""
    rows = [[name, f"{cells['samples']:,}", f"{cells['tokens']:,}"] for name, cells in accounts.rows("reason")]
    rows.append(["issued / generated", f"{accounts.issued:,}", f"{accounts.tokens_generated:,}"])
    table = _table(["account", "samples", "tokens"], rows, numbers=2, last_is_sum=True)
    text = "Every sample issued and every token generated ends in exactly one account."
    return _card("Ledger", text, table, wide=True)


def _events(history: History) -> str:
    rows: list[tuple[float, str, str, str]] = []
    rows += [
        (float(r["wall"]), str(r["level"]), f"{r['actor']}: {r['event']}", str(r["text"])) for r in history.faults[-60:]
    ]
    for r in history.knobs:
        if int(r["epoch"]) > 0:
            values = ", ".join(f"{k} = {v}" for k, v in r["values"].items())
            rows.append(
                (
                    float(r["wall"]),
                    "",
                    f"knob epoch {r['epoch']}",
                    values + (f" ({r['reason']})" if r.get("reason") else ""),
                )
            )
    for r in history.restores[1:]:
        rows.append((float(r["wall"]), "warning", "trainer restored", f"to step {r['step']} {r.get('checkpoint', '')}"))
    if not rows:
        return _card("Events", "No fault, no restart, no knob was turned.", "", wide=True)
    lines = "".join(
        f"<tr><td>{duration(wall - history.first_wall)}</td><td class='level-{level}'>{escape(what)}</td>"
        f"<td>{escape(text[:400])}</td></tr>"
        for wall, level, what, text in sorted(rows)[-40:]
    )
    head = "<thead><tr><th>after</th><th>what</th><th></th></tr></thead>"
    table = f'<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div>'
    return _card("Events", "Faults, restarts and knob changes; the newest last.", table, wide=True)


def _settings(settings: dict[str, dict[str, Any]]) -> str:
    tables = "".join(
        f"<div><h3>{escape(name)}</h3><table>"
        + "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(_value(v))}</code></td></tr>" for k, v in table.items())
        + "</table></div>"
        for name, table in settings.items()
        if table
    )
    versions = "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(v)}</code></td></tr>" for k, v in package_versions())
    shown = f'<details><summary>Settings</summary><div class="settings">{tables}</div></details>' if tables else ""
    return f'<section class="wide">{shown}<details><summary>Versions</summary><table>{versions}</table></details></section>'


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def package_versions() -> list[tuple[str, str]]:
    """Python, platform and the installed packages that decide a run's numbers."""
    found = [("python", sys.version.split()[0]), ("platform", platform.platform()), ("cpus", str(os.cpu_count()))]
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def _footer() -> str:
    made = datetime.now().strftime("%Y-%m-%d %H:%M")
    return f"<footer>Written {made} from metrics.jsonl and settings.toml of this run.</footer>"
