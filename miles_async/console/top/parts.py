"""A run's state as text for a terminal (pure): what `miles-async top` shows of the sections that the web console is told too.

Nothing here is markup: texts of models and hooks are shown as they are, without what a terminal would obey. Colours only repeat
words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.recorder.history import AVG_STALENESS, MAX_STALENESS, REWARD
from bus.errors import printable
from bus.topology import BY_NAME, ROLES
from miles_async.console.figures import TRAINER
from miles_async.console.lines import LEVEL_STYLE, STATE_STYLE
from miles_async.console.text import duration, human_count, percent, progress_bar, shorten, sparkline
from miles_async.console.top.alarms import Alarm

OLD_S = 5.0  # a word of the doctor that is older says so
WIDE, CURVE = 118, 38  # columns from which flow and curves stand side by side; of one curve
Columns = Mapping[str, Sequence[float | None]]
CURVES = {
    "reward": REWARD,
    **TRAINER,
    "staleness avg": AVG_STALENESS,
    "staleness max": MAX_STALENESS,
    "tokens/s": "tokens_per_s",
    "answer length": "rollout/response_len/mean",
    "log-prob diff": "train/train_rollout_logprob_abs_diff",
}
SHORT = {"KL to the reference": "KL reference", "KL of the update": "KL update", "effective samples": "ESS ratio"}
SHOWN_STREAMS = ("prompts", "prefixes", "tail", "rollouts", "parked", "scored", "groups", "policy", "active")
SELDOM = ("prefixes", "tail", "parked")  # shown while something lies there


def head(state: Mapping[str, Any], wall: float, width: int, note: str) -> Text:
    """The run in one line, and in a second one what is the matter with the view itself (`note`)."""
    run, silent = state["run"], state.get("silent", 0)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(shorten(run["name"], max(8, width // 3)), style="bold")
    total = run["total"]
    line.append(f"  step {run['step']}" + (f"/{total}" if total else ""), style="bold")
    if total:
        share = run["step"] / total
        line.append(f" {progress_bar(share, max(6, min(30, width - 66)))} {share:.0%}", style="cyan")
    line.append(f"  {duration((run['last'] or wall) - run['began'])}" if run["began"] else "")
    if run["finished"]:
        line.append("  finished", style="green")
    elif run["ended"]:
        line.append("  not running", style="yellow")
    elif run["ends"]:
        line.append(f"  {duration(run['ends'] - wall)} left")
    if run["version"] >= 0:
        line.append(f"  v{run['version']}")
    if silent:
        line.append(f"\nthe bus has not answered for {duration(silent)}; trying again", style="bold red")
    if note:
        line.append(f"\n{note}", style="yellow")
    return line


def alarm_lines(alarms: Sequence[Alarm], known: int, wall: float, width: int, most: int) -> tuple[Text, list[Alarm]]:
    """At most `most` alarms in two lines each, and which these are; how many more there are stands in the last line."""
    shown = list(alarms[:most])
    lines = Text()
    for alarm in shown:
        begun = duration(wall - alarm.since)
        when = f"for {begun}" if alarm.now else f"{begun} ago"
        times = f" ×{alarm.times}" if alarm.times > 1 else ""
        begin = f"{alarm.level.upper()} {when}{times}  "
        lines.append("\n" if lines else "").append(begin, style=f"bold {LEVEL_STYLE[alarm.level]}")
        lines.append(shorten(f"{alarm.who}: {alarm.text}", 2 * width - len(begin) - 8), style=LEVEL_STYLE[alarm.level])
    more = [f"{len(alarms) - len(shown)} more"] if len(alarms) > len(shown) else []
    more += [f"{known} acknowledged, still so"] if known else []
    if more:
        lines.append("\n" if lines else "").append(" · ".join(more), style="dim")
    return lines, shown


def overview(
    state: Mapping[str, Any],
    columns: Columns,
    steps: Sequence[int],
    wall: float,
    width: int,
    *,
    tall: bool,
    said: float = 0.0,
    cut: bool = False,
) -> RenderableType:
    """Why the trainer waits, the flow, the curves, where time goes, drops, the ledger. `said`: wall of the doctor's word. `cut`:
    what does not fit cannot be scrolled to, so the curves come last."""
    parts: list[RenderableType] = [_why(state["why"], wall - said if said and not state["run"]["ended"] else 0.0, lately=tall)]
    facts = _facts(state)
    if width >= WIDE:
        side = Table.grid(padding=(0, 3))
        side.add_row(flow(state["flow"], wall, width), learning(columns, steps, width - 66))
        parts += [Text(), side, Text(), facts]
    else:
        curves = learning(columns, steps, width)
        parts += [flow(state["flow"], wall, width), *((facts, curves) if cut else (curves, facts))]
    return Group(*parts)


def _why(why: Mapping[str, Any], ago_s: float, *, lately: bool) -> Text:
    text = Text(printable(why["text"]), style="yellow" if why["waits"] else "", overflow="fold")
    if ago_s > OLD_S:
        text.append(f" (said {duration(ago_s)} ago)", style="dim")
    return text.append(f" {why['lately']}", style="dim") if lately and why["lately"] else text


def flow(state: Mapping[str, Any], wall: float, width: int) -> RenderableType:
    """Each arrow with what lies on it, how fast it moves and how old the oldest held entry is."""
    table = _table("flow", "waiting", "held", "a second", "oldest")
    for name in SHOWN_STREAMS:
        facts = state["streams"].get(name)
        if facts is None or (name in SELDOM and not facts["depth"]):
            continue
        stream = BY_NAME[name]
        to = "/".join(stream.readers) or ("publisher" if name == "policy" else "generation")
        arrow = Text(f"{stream.writer} ─" if width >= 66 else "").append(name, style="bold").append(f"▶ {to}")
        waiting = str(facts["depth"] - facts["held"]) if facts["data"] else "-"
        oldest = facts["since"] if facts["data"] else facts["newest"]
        rate = "" if facts["rate"] is None else human_count(facts["rate"])
        old = duration(wall - oldest) if oldest else ""
        table.add_row(arrow, waiting, str(facts["held"]) if facts["data"] else "-", rate, old)
    return table


def _rooms(rooms: Mapping[str, Any]) -> Text:
    """Living actors of each room, what they have in work; those that are not well stand out."""
    line = Text()
    for role, room in rooms.items():
        line.append(" · " if line else "")
        busy = f" ({room['busy']} in work)" if room["busy"] else ""
        line.append(f"{role} {room['alive']}{busy}")
        if room["wrong"]:
            line.append(f" {room['wrong']} WRONG", style="bold red")
    return line


def learning(columns: Columns, steps: Sequence[int], width: int) -> RenderableType:
    """A curve in each cell: name, newest value, its course over the whole run."""
    if not steps:
        return Text("no step yet", style="dim")
    across = max(1, width // CURVE)
    room = width // across
    table = Table.grid(padding=(0, 2, 0, 0))
    cells = []
    for name, key in CURVES.items():
        values = [v for v in columns.get(key, ()) if v is not None]
        if values:
            name = SHORT.get(name, name)
            text = Text(
                f"{name:13} {human_count(values[-1]) if abs(values[-1]) >= 1 else f'{values[-1]:.3g}':>8} ",
                no_wrap=True,
            )
            cells.append(text.append(sparkline(values, max(4, room - 26)), style="green"))
    for i in range(0, len(cells), across):
        table.add_row(*cells[i : i + across])
    return table


def _facts(state: Mapping[str, Any]) -> RenderableType:
    run, engines, flow = state["run"], state["engines"], state["flow"]
    rows: list[tuple[str, Text]] = [("rooms", _rooms(flow["rooms"]))]
    if run["shares"]:
        rows.append(("trainer", _bars(zip(("waiting", "training", "publishing"), run["shares"], strict=True))))
    if engines["split"]:
        used = engines["slots_used"]
        rows.append(("engines", _bars(engines["split"].items()).append("" if used is None else f"  slots used {used:.0%}")))
    if engines["serving"]:
        serving = ", ".join(f"{'none yet' if v < 0 else f'v{v}'} ×{n}" for v, n in engines["serving"])
        rows.append(("serving", Text(f"{serving}; newest announced v{flow['announced']}")))
    for one in state["evals"]:
        points = [p[1] for p in one["points"]]
        text = Text(f"{percent(points[-1])} at step {one['points'][-1][0]}, from {percent(points[0])}  ")
        rows.append((one["name"], text.append(sparkline(points, 24), style="green")))
    rows += [(name, Text(f"failed: {why}", style="red")) for name, why in run["failed_evals"].items()]
    if state["ages"]:
        ages = "  ".join(f"{age}: {share:.0%}" for age, share in sorted(state["ages"].items()))
        rows.append(("ages", Text(f"{ages} of the samples, by versions between first token and training")))
    if state["drops"]["total"]:
        shown = " · ".join(f"{why} {human_count(n)} ({meaning})" for why, n, meaning in state["drops"]["total"][:6])
        rows.append(("dropped", Text(f"groups: {shown}")))
    if run["ledger"]:
        rows.append(("ledger", Text(run["ledger"])))
    if run["knob"]:
        rows.append(("knobs", Text(f"epoch {run['knob_epoch']}: {run['knob']}")))
    if run["wrote"]:
        rows.append(("wrote", Text(run["wrote"], style="italic")))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, max_width=10)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(shorten(name, 10)), Text(printable(value.plain), spans=value.spans, overflow="fold"))
    return grid


def _bars(shares: Iterable[tuple[str, float]]) -> Text:
    text = Text()
    for name, share in shares:
        text.append("  " if text else "").append(f"{name} ").append("█" * round(10 * share), style="cyan").append(f"{share:.0%}")
    return text


def engines(state: Mapping[str, Any], wall: float, width: int) -> RenderableType:
    """Every actor; of an engine also its running requests, queue and KV room."""
    wide, rows = width >= 72, []
    order = {role: i for i, role in enumerate(ROLES)} | {"generation": -1}
    for actor in sorted(state["actors"], key=lambda a: (order.get(a["role"], 99), a["name"])):
        silent = actor["heard"] is not None
        what = ("dead" if actor["life"] == "dead" else "silent") if silent else actor["doing"] or actor["state"]
        since = actor["heard"] or actor["since"]
        kv = "" if actor["kv"] is None else f"{actor['kv']:.0%}"
        queued = "" if actor["queued"] is None else f"{actor['queued']:.0f}"
        version = f"v{actor['version']}" if actor["version"] >= 0 else ""
        busy = f"{actor['busy']}/{actor['slots']}" if actor["slots"] else str(actor["busy"] or "")
        middle = (queued, kv, duration(wall - since) if since else "") if wide else (kv,)
        style = "bold red" if silent else STATE_STYLE.get(actor["state"], "")
        cells = (actor["name"], what if width >= 100 else shorten(what, 13), version, busy, *middle)
        rows.append((style, cells, actor["waits"]))
    columns = ("actor", "state", "version", "busy", *(("queued", "KV", "for") if wide else ("KV",)))
    taken = sum(2 + max(map(len, (name, *(cells[i] for _, cells, _ in rows)))) for i, name in enumerate(columns))
    table = _table(*columns, "waits for", left=("state", "waits for"))
    for style, cells, waits in rows:
        table.add_row(*map(Text, cells), Text(shorten(waits, max(8, width - taken))), style=style)
    return table


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_edge=False, expand=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if not i or name in left else "right", no_wrap=True, overflow="ellipsis")
    return table
