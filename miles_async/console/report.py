"""runs/<name>/report.html: what a run did, on one page without network or scripts.

Reads  metrics.jsonl and settings.toml of the run    Owns  report.html, replaced by rename
"""

from __future__ import annotations

import os
import platform
import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from actors.recorder.history import LOSS, MAX_STALENESS, REWARD, History
from bus.errors import InvariantBroken
from bus.ledger import Accounts, accounts_of
from bus.messages.reasons import meaning
from miles_async.console.figures import TRAINER, shares, throughput
from miles_async.console.report_data import ReportedRun, data_of, read_run
from miles_async.console.shadow.results import notes as shadow_notes
from miles_async.console.text import duration, human_bytes, human_count, knob_text, percent, plural
from miles_async.console.whatif.advice import advise, share

FILE, COMPARED = "report.html", "report-compared.html"
PACKAGES = ("miles-async", "torch", "transformers", "tokenizers", "safetensors", "numpy", "redis", "msgspec", "uvloop",
            "sglang", "sglang-router", "megatron-core", "ray")  # fmt: skip
HERE = Path(__file__).parent
STATIC = HERE / "web" / "static"
SCRIPTS = (
    *(STATIC / f"{name}.js" for name in ("format", "dom", "chartlist", "samples")),
    *(HERE / f"{name}.js" for name in ("report_charts", "report")),
)
"""Modules of the web console and the report's own, each after those that it imports."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src {}"
LATER = "<noscript><p>Curves and samples need a browser that runs scripts; the tables below do not.</p></noscript>"
CURVES = (
    f'<nav id="controls" aria-label="Curves"></nav>{LATER}<p id="spoken" class="unseen" role="status"></p><div id="charts"></div>'
)


def write_report(run_dir: Path, others: Sequence[Path] = (), path: Path | None = None) -> Path:
    """Make the report of a run from what it left in its folder, with the curves of `others` over its own; works during the run and
    after any end of it. `path`: where to; else in the run's folder. OSError where it cannot be written."""
    page = render([read_run(one) for one in (run_dir, *others)])
    path = path or run_dir / (COMPARED if others else FILE)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        fresh.write_text(page, "utf-8")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # a part of it would fill the disk for good
        raise
    return path


def render(runs: Sequence[ReportedRun]) -> str:
    """The whole page, about the first of these runs. What it may load or run is said in its head: nothing but its own parts."""
    first = runs[0]
    history, accounts = first.history, _accounts(first.history)
    plot = (STATIC / "vendor" / "uPlot.iife.min.js").read_text("utf-8")
    page = joined(path.read_text("utf-8") for path in SCRIPTS)
    styles = (STATIC / "vendor" / "uPlot.min.css").read_text("utf-8") + (HERE / "report.css").read_text("utf-8")
    allowed = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in (plot, page))
    data = msgspec.json.encode([data_of(run, len(runs)) for run in runs]).decode().replace("<", "\\u003c")
    body = "\n".join(
        [
            _header(first.name, history),
            _notes(history, accounts, shadow_notes(first.dir)),
            _tiles(history, accounts),
            CURVES,
            _card("Samples", "What the policy wrote: kept now and then, whole groups.",
                  '<div id="filters"></div><p id="found" role="status"></p><div id="list"></div>'),
            _differences(runs),
            _evals(history),
            _trainer(history),
            _scheduling(history),
            _drops(history, accounts),
            _ledger(accounts),
            _system(first),
            _events(history),
            _settings(first.settings),
            _footer(),
        ]
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(allowed)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(' and '.join(run.name for run in runs))}: run report</title>\n<style>\n{styles}</style>\n</head>\n<body>\n"
        f'<main>\n{body}\n</main>\n<script type="application/json" id="data">{data}</script>\n'
        f'<script>{plot}</script>\n<script type="module">{page}</script>\n</body>\n</html>\n'
    )


def joined(modules: Iterable[str]) -> str:
    """Modules as one: a page that is one file has no other to import."""
    return "".join(re.sub(r"^export ", "", re.sub(r"^import .*\n", "", text, flags=re.M), flags=re.M) for text in modules)


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
        name, what = (LOSS, "loss") if history.supervised else (REWARD, "training reward")
        tiles.append((f"{sum(s.get(name) for s in recent) / len(recent):.3f}", f"{what}, last tenth"))
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


def _card(title: str, text: str, body: str) -> str:
    said = f"<p>{escape(text)}</p>" if text else ""
    return f"<section><h2>{escape(title)}</h2>{said}\n{body}\n</section>"


def _differences(runs: Sequence[ReportedRun]) -> str:
    """Settings in which the runs are not alike."""
    if len(runs) < 2:
        return ""
    names = dict.fromkeys((group, key) for run in runs for group, table in run.settings.items() for key in table)
    rows = [[key, *(_value(run.settings.get(group, {}).get(key, "")) for run in runs)] for group, key in names]
    unlike = [row for row in rows if len(set(row[1:])) > 1]
    table = _table(["setting", *(run.name for run in runs)], unlike, numbers=0)
    return _card("Settings that differ", "", table) if unlike else _card("Settings that differ", "None.", "")


def _evals(history: History) -> str:
    rows = []
    for name in history.eval_names():
        found = history.evals_of(name)
        best = max(found, key=lambda e: e.score)
        scores = (f"{found[0].score:.4g}", f"{best.score:.4g} (step {best.step})", f"{found[-1].score:.4g}")
        rows.append([name, str(len(found)), *scores])
    table = _table(["set", "evaluations", "first", "best", "last"], rows, numbers=4)
    return _card("Evaluations", "Mean reward of held-out prompts.", table) if rows else ""


def _scheduling(history: History) -> str:
    """How the time went, what the bound costs these lengths, and what others would."""
    steps, parts = history.steps, []
    if steps:
        wait, train, publish = shares(steps)
        parts.append(
            f"The trainer trained {train:.0%} of its time, waited {wait:.0%} for rollouts, published and saved {publish:.0%}."
        )
        cut = steps[-1].get("rollout/truncated_ratio")
        parts.append(f"{percent(cut)} of the last step's responses reached the limit of their length.")
    if history.activations:
        parts.append(_pauses_text(history))
    advice = advise(history)
    table = ""
    if advice is not None:
        parts += advice.lines
        under = f"{advice.choices[0].rule}, {advice.observed.slots} slots"
        parts.append(f"Simulated with these lengths (docs/scheduling.md), {under}:")
        rows = []
        for c in advice.choices:
            rows.append([str(c.bound), f"{c.step_s:.3g}", f"{c.running:.0f}", share(c.masked), f"{c.split:.0%}"])
        table = _table(["bound", "s a step", "running", "tokens masked", "groups split"], rows, numbers=4)
    return _card("Scheduling", "", "".join(f"<p>{escape(line)}</p>" for line in parts) + table) if parts else ""


def _pauses_text(history: History) -> str:
    waits = sorted(1000 * float(r["pause_s"]) for r in history.activations)
    whole = sorted(1000 * float(r["total_s"]) for r in history.activations)
    high = waits[min(len(waits) - 1, int(0.95 * len(waits)))]
    return (
        f"Generation stands still for {median(waits):.0f} ms (median), {high:.0f} ms (95 %) at a new version; "
        f"with checks before it {median(whole):.0f} ms. {plural(len(waits), 'activation')}."
    )


def _drops(history: History, accounts: Accounts | None) -> str:
    """By reason, most first."""
    if accounts is not None and accounts.dropped:
        of, unit, issued = accounts.dropped, "samples", f" of {accounts.issued:,} issued"
    else:
        of, unit, issued = history.drops, "groups", ""
    if not of:
        return ""
    rows = [[why, f"{n:,}", meaning(why)] for why, n in sorted(of.items(), key=lambda i: -i[1])]
    table = _table(["reason", unit, ""], rows, numbers=0)
    return _card("Dropped", f"{sum(of.values()):,} {unit}{issued}, by reason.", table)


def _system(run: ReportedRun) -> str:
    """What each host and Redis used: mean and most."""
    rows = []
    for source, found in run.system.items():
        for name in sorted({name for row in found for name in row} - {"wall"}):
            values = [row[name] for row in found if name in row]
            show = percent if name.endswith("_share") else human_bytes if "bytes" in name else human_count
            rows.append([source, name, show(sum(values) / len(values)), show(max(values))])
    return _card("Hosts and Redis", "", _table(["", "", "mean", "most"], rows, numbers=2)) if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int, last_is_sum: bool = False) -> str:
    """`numbers`: how many columns, from the right, are flush right."""
    first = len(head) - numbers
    kinds = ["" if i < first else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{k}>{escape(cell)}</th>" for k, cell in zip(kinds, head, strict=True))
    lines = []
    for number, row in enumerate(rows):
        total = ' class="sum"' if last_is_sum and number == len(rows) - 1 else ""
        cells = "".join(f"<td{k}>{escape(c)}</td>" for k, c in zip(kinds, row, strict=True))
        lines.append(f"<tr{total}>{cells}</tr>")
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


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


def _ledger(accounts: Accounts | None) -> str:
    if accounts is None:
        return ""
    rows = [[name, f"{cells['samples']:,}", f"{cells['tokens']:,}"] for name, cells in accounts.rows("reason")]
    rows.append(["issued / generated", f"{accounts.issued:,}", f"{accounts.tokens_generated:,}"])
    table = _table(["account", "samples", "tokens"], rows, numbers=2, last_is_sum=True)
    text = "Every sample issued and every token generated ends in exactly one account."
    return _card("Ledger", text, table)


def _events(history: History) -> str:
    rows: list[tuple[float, str, str, str]] = []
    for r in history.faults[-60:]:
        rows.append((float(r["wall"]), str(r["level"]), f"{r['actor']}: {r['event']}", str(r["text"])))
    for r in history.knobs:
        if int(r["epoch"]) > 0:
            why = f" ({r['reason']})" if r.get("reason") else ""
            rows.append((float(r["wall"]), "", f"knob epoch {r['epoch']}", knob_text(r) + why))
    for r in history.restores[1:]:
        rows.append((float(r["wall"]), "warning", "trainer restored", f"to step {r['step']} {r.get('checkpoint', '')}"))
    if not rows:
        return _card("Events", "No fault, no restart, no knob was turned.", "")
    lines = "".join(
        f"<tr><td>{duration(wall - history.first_wall)}</td><td class='level-{level}'>{escape(what)}</td>"
        f"<td>{escape(text[:400])}</td></tr>"
        for wall, level, what, text in sorted(rows)[-40:]
    )
    head = "<thead><tr><th>after</th><th>what</th><th></th></tr></thead>"
    table = f'<div class="scroll" tabindex="0"><table>{head}<tbody>{lines}</tbody></table></div>'
    return _card("Events", "Faults, restarts and knob changes; the newest last.", table)


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
    return f"<section>{shown}<details><summary>Versions</summary><table>{versions}</table></details></section>"


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
