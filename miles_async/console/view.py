"""A run on one screen (pure): snapshot and history to rich renderables, and to one line per step for plain output.

Wide terminals show streams and actors side by side; below WIDE they stand under each other, below NARROW columns that
explain leave first. Colours only repeat what the words say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.recorder.history import AVG_STALENESS, MAX_STALENESS, REWARD, History, Step
from actors.runtime.snapshot import ActorFacts, Snapshot
from bus.client import without_secrets
from bus.errors import printable
from bus.ledger import accounts_of
from bus.messages.control import Vitals
from miles_async.console.figures import RECENT, TRAINER, alarms, eta_s, lying, shares, throughput
from miles_async.console.text import (
    duration,
    human_bytes,
    human_count,
    percent,
    plural,
    progress_bar,
    shorten,
    sparkline,
)
from miles_async.settings.run import RunSettings

WIDE, NARROW, TALL = 118, 72, 36
LIFE_STYLE = {"alive": "", "ended": "dim", "late": "yellow", "dead": "bold red"}
STATE_STYLE = {"running": "green", "waiting": "", "starting": "cyan", "draining": "cyan", "stalled": "bold red",
               "stopped": "dim", "failed": "bold red"}  # fmt: skip
WRONG = ("stalled", "failed")
LEVEL_STYLE = {"warning": "yellow", "error": "red"}


def screen(
    snapshot: Snapshot, history: History, *, total_steps: int, width: int, silent_s: float = 0.0, height: int = 50
) -> RenderableType:
    """The whole view. `silent_s`: how long the bus has not answered; shown when it is long enough to matter. Below TALL the
    rooms between the parts go, actors are named on few lines, and what is wrong stands at the top, where nothing is cut."""
    tall = height >= TALL
    gap = [Text()] if tall else []
    parts: list[RenderableType] = [_title(snapshot, history, total_steps, width)]
    if silent_s > 3:
        parts.append(Text(f"the bus has not answered for {duration(silent_s)}; trying again", style="bold red"))
    faults = _faults(history, snapshot.wall, 3 if tall else 2)
    if not tall:
        parts += faults
    parts += [*gap, *_learning(snapshot, history, width), *gap]
    if not tall:
        parts += [_named(snapshot, width), _streams(snapshot, history, width, empty=False)]
    else:
        streams, actors = _streams(snapshot, history, width), _actors(snapshot, width)
        if width >= WIDE:
            grid = Table.grid(padding=(0, 4))
            grid.add_row(streams, actors)
            parts.append(grid)
        else:
            parts += [streams, Text(), actors]
    parts += [*gap, *_accounts(snapshot, history, width)]
    if tall and faults:
        parts += [Text(), *faults]
    return Group(*parts)


def _title(snapshot: Snapshot, history: History, total_steps: int, width: int) -> RenderableType:
    step = history.steps[-1].step if history.steps else snapshot.policy.step
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{shorten(snapshot.run, max(8, width // 3))} ", style="bold")
    line.append(f" step {step}" + (f"/{total_steps}" if total_steps > 0 else ""), style="bold")
    if total_steps > 0:
        cells = max(8, min(40, width - 62))
        line.append(f"  {progress_bar(step / total_steps, cells)} {100 * step / total_steps:.0f}%", style="cyan")
    elapsed = max(0.0, snapshot.wall - history.first_wall) if history.first_wall else 0.0
    line.append(f"   {duration(elapsed)}")
    left = eta_s(history, total_steps)
    if snapshot.policy.finished or history.finished:
        line.append("   finished", style="green")
    elif left is not None:
        line.append(f"   {duration(left)} left")
    if history.lost_steps:
        line.append(f"   {history.lost_steps} steps done again", style="yellow")
    return line


def _learning(snapshot: Snapshot, history: History, width: int) -> list[RenderableType]:
    rows: list[tuple[str, Text]] = []
    steps = history.steps
    cells = max(10, min(60, width - 34))
    if steps:
        rewards = [s.get(REWARD) for s in steps]
        text = Text(f"{_mean(rewards[-RECENT:]):.3f}  ")
        text.append(sparkline(rewards, cells), style="green")
        rows.append(("reward", text))
    else:
        rows.append(("reward", Text("no step yet", style="dim")))
    for name in history.eval_names():
        evals = history.evals_of(name)
        text = Text(f"{percent(evals[-1].score):>6} ", style="bold")
        text.append(f" at step {evals[-1].step}, from {percent(evals[0].score)}", style="")
        if evals[-1].share < 1:
            text.append(f" · {percent(evals[-1].share)} of its tokens by that step", style="dim")
        if len(evals) > 1:
            text.append("  " + sparkline([e.score for e in evals], 24), style="green")
        rows.append((shorten(name, 10), text))
    for name, failed in history.failed_evals.items():
        rows.append((shorten(name, 10), Text(f"failed at step {failed['step']}: {failed['error']}", style="red")))
    recent = steps[-RECENT:]
    if recent:
        wait, train, publish = shares(recent)
        text = Text(human_count(throughput(recent)), style="bold")
        text.append(f"   waiting {wait:.0%} · training {train:.0%} · publishing {publish:.0%}")
        rows.append(("tokens/s", text))
        last = recent[-1]
        text = Text(f"{last.get(AVG_STALENESS):.2f} avg, {last.get(MAX_STALENESS):.0f} max of trained tokens")
        if masked := last.get("rollout/masked_fraction"):
            text.append(f", {percent(masked)} masked as older")
        rows.append(("staleness", text))
        said = {name: last.metrics[key] for name, key in TRAINER.items() if key in last.metrics}
        rows.append(("trainer", Text(" · ".join(f"{name} {value:.3g}" for name, value in said.items()))))
        length, longest = last.get("rollout/response_len/mean"), last.get("rollout/response_len/max")
        text = Text(f"{length:.0f} tokens avg, {longest:.0f} max")
        if history.samples:
            text.append(f"   {shorten(str(history.samples[-1]['response']), 200)}", style="italic")
        rows.append(("response", text))
    policy = snapshot.policy
    text = Text(f"v{policy.announced}" if policy.announced >= 0 else "none announced", style="bold")
    if policy.announced >= 0:
        text.append(f" announced {duration(policy.announced_age_s)} ago")
        text.append(f"   serving {_serving(policy.serving)}" if policy.serving else "   no engine serves yet")
    rows.append(("policy", text))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=9)
    grid.add_column(overflow="ellipsis")  # this one gives way when the terminal is narrow
    for name, value in rows:
        value.no_wrap, value.overflow = True, "ellipsis"
        grid.add_row(name, value)
    return [grid]


def _serving(serving: dict[str, int]) -> str:
    by_version: dict[int, int] = {}
    for version in serving.values():
        by_version[version] = by_version.get(version, 0) + 1
    parts = [f"{'none yet' if v < 0 else f'v{v}'} ×{n}" for v, n in sorted(by_version.items(), reverse=True)]
    return ", ".join(parts)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True, overflow="ellipsis")
    return table


def _streams(snapshot: Snapshot, history: History, width: int, *, empty: bool = True) -> RenderableType:
    columns = [("stream", "left"), ("depth", "right"), ("held", "right"), ("oldest", "right")]
    if width >= NARROW:
        columns.append(("bytes", "right"))
    table = _table(*columns)
    for facts in snapshot.streams.values():
        if not facts.is_data or (not facts.length and (not empty or facts.name.startswith("eval"))):
            continue
        found = lying(facts, history)
        name = facts.name + (f" (+{found.unsaved} to save)" if found.unsaved else "")
        row = [name, str(found.depth), str(found.held), duration(found.oldest_s) if found.held else ""]
        if width >= NARROW:
            row.append(human_bytes(facts.n_bytes) if facts.n_bytes else "")
        table.add_row(*row, style="" if facts.length else "dim")
    return table


def _actors(snapshot: Snapshot, width: int) -> RenderableType:
    columns = [("actor", "left"), ("state", "left"), ("version", "right"), ("busy", "right")]
    if width >= NARROW:
        columns.append(("waits for", "left"))
    table = _table(*columns)
    room = max(16, (width - 90) if width >= WIDE else (width - 44))
    for actor in _shown(snapshot):
        vitals = actor.vitals
        version = f"v{vitals.version}" if vitals.version >= 0 else ""
        row: list[RenderableType] = [
            vitals.actor,
            state_text(actor),
            version,
            busy_text(vitals) if vitals.in_flight else "",
        ]
        if width >= NARROW:
            row.append(shorten(waits_text(actor), room))
        table.add_row(*row, style=LIFE_STYLE[actor.life] or STATE_STYLE.get(vitals.state, ""))
    if not snapshot.actors:
        table.add_row("none yet", "", "", "", *([""] if width >= NARROW else []), style="dim")
    return table


def _shown(snapshot: Snapshot) -> list[ActorFacts]:
    """All actors; the launcher only when it is missed."""
    return [a for a in snapshot.actors if a.vitals.role != "launcher" or a.life in ("late", "dead")]


def _named(snapshot: Snapshot, width: int) -> RenderableType:
    """Every actor with its state, one after the other; those that are not well first."""
    shown = sorted(_shown(snapshot), key=lambda a: a.life not in ("late", "dead") and a.vitals.state not in WRONG)
    line = Text(overflow="fold")
    for actor in shown:
        line.append(" · " if line else f"{len(shown)} actors: ", style="dim")
        line.append(f"{actor.vitals.actor} ")
        line.append(state_text(actor))
        if actor.vitals.in_flight:
            line.append(f" {busy_text(actor.vitals)}")
    return line


def state_text(actor: ActorFacts) -> Text:
    """State, or what the heartbeat says when it is missing."""
    life, state = actor.life, actor.vitals.state
    if life in ("late", "dead"):
        return Text(f"{'dead' if life == 'dead' else 'silent'} {duration(actor.age_s)}", style=LIFE_STYLE[life])
    return Text(state, style=STATE_STYLE.get(state, ""))


def busy_text(vitals: Vitals) -> str:
    """Entries it works on; of a generation worker also how many it takes at once."""
    return f"{vitals.in_flight} of {vitals.slots}" if vitals.slots else str(vitals.in_flight)


def waits_text(actor: ActorFacts) -> str:
    """What it waits for and how long, or its note; empty when it works."""
    vitals = actor.vitals
    if actor.life == "ended":
        return vitals.note
    if not vitals.waits_for:
        return vitals.note
    since = f" {duration(actor.waited_s)}" if actor.waited_s >= 1 else ""
    return f"{vitals.waits_for}{since}"


def _accounts(snapshot: Snapshot, history: History, width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    accounts = accounts_of(snapshot.ledger)
    dropped = sorted(accounts.dropped.items(), key=lambda item: -item[1])
    if dropped:
        shown = " · ".join(f"{reason} {human_count(n)}" for reason, n in dropped[:6])
        lines.append(_labelled("dropped", Text(shown, no_wrap=True, overflow="ellipsis")))
    if accounts.issued:
        lines.append(_labelled("ledger", Text(ledger_line(snapshot, history.unsaved_groups()), no_wrap=True, overflow="ellipsis")))
    if dead := snapshot.streams["dead"].length:
        lines.append(_labelled("dead", Text(f"{plural(dead, 'dead letter')}: miles-async bus dead list", style="red")))
    if snapshot.knob_epoch > 0 and history.knobs:
        patch = history.knobs[-1]
        values = ", ".join(f"{k}={v}" for k, v in patch["values"].items())
        lines.append(_labelled("knobs", Text(shorten(f"epoch {snapshot.knob_epoch}: {values}", width - 12))))
    return lines


def _labelled(label: str, text: Text) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=9)
    grid.add_column(overflow="ellipsis")  # this one gives way when the terminal is narrow
    grid.add_row(label, text)
    return grid


def ledger_line(snapshot: Snapshot, unsaved_groups: int = 0) -> str:
    """The equation in samples, and whether it holds against the open groups. A sample counts as trained from the checkpoint on
    that holds its step: `unsaved_groups` still wait for theirs."""
    a = accounts_of(snapshot.ledger)
    dropped = sum(a.dropped.values())
    off = a.pending - snapshot.open_samples
    state = "" if not off else f"  OFF BY {off:+d}: miles-async ledger --check"
    unsaved = f" ({plural(unsaved_groups, 'group')} trained, not in a checkpoint yet)" if unsaved_groups else ""
    return f"issued {a.issued:,} = trained {a.trained:,} + dropped {dropped:,} + pending {a.pending:,}{unsaved}{state}"


def _faults(history: History, wall: float, count: int) -> list[RenderableType]:
    """Alarms; long ones go on in the next line: nothing of them is cut."""
    return [
        Text(
            shorten(f"{duration(wall - float(r['wall']))} ago {r['actor']}: {r['event']}: {r['text']}", 400),
            style=LEVEL_STYLE.get(str(r["level"]), ""),
            overflow="fold",
        )
        for r in alarms(history, wall, count)
    ]


def banner(settings: RunSettings) -> str:
    """What a run is, said before anything takes time: model, data, workers, trainer, folder; then what is done first."""
    r, s, perf = settings.rollout, settings.sglang, settings.perf
    rewards = r.custom_rm_path or r.rm_type or "the data's own"
    external = f" and {plural(n, 'running engine')}" if (n := len(s.rollout_external_engine_addrs)) else ""
    gpus = f" on {plural(len(s.rollout_gpu_ids), 'GPU')}" if s.rollout_gpu_ids else ""
    steps = plural(r.num_rollout, "step") if r.num_rollout else "epochs"
    facts = {
        "model": settings.model.hf_checkpoint,
        "data": f"{r.prompt_data or r.data_source_path}, rewards by {rewards}",
        "plan": f"{steps} of {r.rollout_batch_size} prompts × {r.n_samples_per_prompt} answers, staleness at most "
        f"{r.max_weight_staleness}",
        "workers": f"{plural(s.num_generation_workers, 'generation worker')}{external}, {s.engine} engines{gpus}",
        "trainer": f"{perf.train_backend}, {plural(settings.flat.train_ranks, 'rank')}",
        "folder": str(settings.run_dir),
        "bus": without_secrets(settings.bus.bus_url) if settings.bus.bus_url else "a Redis of its own in the folder",
    }
    lines = [f"run {settings.launch.name}", *(f"  {name:8} {printable(str(fact))}" for name, fact in facts.items())]
    return "\n".join([*lines, "checking model and data, then Redis and the actors are started"])


def starting(roles: Iterable[str], groups: int) -> str:
    """Which actors are being started, and what the first step waits for."""
    count = Counter(roles)
    said = ", ".join(role if n == 1 else f"{role} ×{n}" for role, n in count.items())
    return f"starting {said}; the first step waits for engines with the weights, then for {plural(groups, 'scored group')}"


def step_line(step: Step, history: History, *, total_steps: int) -> str:
    """One training step as one line of plain text."""
    of = f"/{total_steps}" if total_steps > 0 else ""
    parts = [
        f"step {step.step}{of}",
        f"reward {step.get(REWARD):.3f}",
        f"tokens/s {human_count(throughput([s for s in history.steps if s.step <= step.step][-RECENT:]))}",
        f"staleness {step.get(AVG_STALENESS):.2f}/{step.get(MAX_STALENESS):.0f}",
        f"len {step.get('rollout/response_len/mean'):.1f}",
        f"wait {step.get('perf/wait_s'):.2f} s",
        f"train {step.get('perf/train_s'):.2f} s",
    ]
    if history.drops:
        parts.append(f"dropped {sum(history.drops.values())} groups")
    left = eta_s(history, total_steps)
    if left:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
