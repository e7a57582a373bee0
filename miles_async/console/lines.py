"""A run in words (pure): what it is, a line for each record, states and waits of actors, the equation of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from actors.recorder.history import AVG_STALENESS, LOSS, MAX_STALENESS, REWARD, History, Step
from actors.recorder.records import Record
from actors.runtime.snapshot import ActorFacts, Snapshot
from bus.client import without_secrets
from bus.errors import printable
from bus.ledger import accounts_of
from bus.messages.control import Vitals
from bus.messages.waits import Wait
from miles_async.console.figures import RECENT, eta_s, throughput
from miles_async.console.text import duration, human_count, knob_text, percent, plural, shorten

if TYPE_CHECKING:  # `status` does without, which takes as long to load as all else here
    from miles_async.settings.run import RunSettings

FIRST_SAMPLES = 2  # shown in words at the start of a run; miles-async samples shows more
STATE_STYLE = {"running": "green", "waiting": "", "starting": "cyan", "draining": "cyan", "stalled": "bold red",
               "stopped": "dim", "failed": "bold red"}  # fmt: skip
LEVEL_STYLE = {"warning": "yellow", "error": "red"}


def state_text(actor: ActorFacts) -> Text:
    """State, or what the heartbeat says when it is missing."""
    life, state = actor.life, actor.vitals.state
    if life in ("late", "dead"):
        word, style = ("dead", "bold red") if life == "dead" else ("silent", "yellow")
        return Text(f"{word} {duration(actor.age_s)}", style=style)
    return Text(state, style=STATE_STYLE.get(state, ""))


def busy_text(vitals: Vitals) -> str:
    """Entries it works on; of a rollout worker also how many it takes at once."""
    return f"{vitals.in_flight} of {vitals.slots}" if vitals.slots else str(vitals.in_flight)


def waits_text(actor: ActorFacts) -> str:
    """What it waits for and how long, or its note; empty when it works."""
    vitals = actor.vitals
    if actor.life == "ended":
        return vitals.note
    if not vitals.waits_for:
        return vitals.note
    since = f" {duration(actor.waited_s)}" if actor.waited_s >= 1 else ""
    so_far = f" ({vitals.note})" if vitals.note and vitals.wait in (Wait.READING, Wait.BOOTING) else ""
    return f"{vitals.waits_for}{since}{so_far}"


def ledger_line(snapshot: Snapshot, unsaved_groups: int = 0) -> str:
    """The equation in samples, and whether it holds against the open groups. A sample counts as trained from the checkpoint on
    that holds its step: `unsaved_groups` still wait for theirs."""
    a = accounts_of(snapshot.ledger)
    dropped = sum(a.dropped.values())
    off = a.pending - snapshot.open_samples
    state = "" if not off else f"  OFF BY {off:+d}: miles-async ledger --check"
    unsaved = f" ({plural(unsaved_groups, 'group')} trained, not in a checkpoint yet)" if unsaved_groups else ""
    return f"issued {a.issued:,} = trained {a.trained:,} + dropped {dropped:,} + pending {a.pending:,}{unsaved}{state}"


def banner(settings: RunSettings) -> str:
    """What a run is, said before anything takes time: model, data, workers, trainer, folder; then what is done first."""
    r, s, perf = settings.rollout, settings.sglang, settings.perf
    scored = f"rewards by {r.custom_rm_path or r.rm_type or 'the data itself'}"
    learned = "its responses are learned" if settings.flat.supervised else scored
    external = f" and {plural(n, 'running engine')}" if (n := len(s.rollout_external_engine_addrs)) else ""
    gpus = f" on {plural(len(s.rollout_gpu_ids), 'GPU')}" if s.rollout_gpu_ids else ""
    engines = f"{s.engine if settings.flat.engine_kind.generates else 'no'} engines"
    steps = plural(r.num_rollout, "step") if r.num_rollout else "epochs"
    facts = {
        "model": settings.model.hf_checkpoint,
        "data": f"{r.prompt_data or r.data_source_path}, {learned}",
        "plan": f"{steps} of {r.rollout_batch_size} prompts × {r.n_samples_per_prompt} answers, staleness at most "
        f"{r.max_weight_staleness}",
        "workers": f"{plural(s.num_generation_workers, 'rollout worker')}{external}, {engines}{gpus}",
        "trainer": f"{perf.train_backend}, {plural(settings.flat.train_ranks, 'rank')}",
        "folder": str(settings.run_dir),
        "bus": without_secrets(settings.bus.bus_url) if settings.bus.bus_url else "a Redis of its own in the folder",
    }
    lines = [f"run {settings.launch.name}", *(f"  {name:8} {printable(str(fact))}" for name, fact in facts.items())]
    return "\n".join([*lines, "checking model and data, then Redis and the actors are started"])


def starting(roles: Iterable[str], settings: RunSettings) -> str:
    """Which actors are being started, and what the first step waits for."""
    count = Counter(roles)
    said = ", ".join(role if n == 1 else f"{role} ×{n}" for role, n in count.items())
    groups = settings.rollout.rollout_batch_size
    weights = "engines with the weights, then for " if settings.flat.engine_kind.generates else ""
    what = "group" if settings.flat.supervised else "scored group"
    return f"starting {said}; the first step waits for {weights}{plural(groups, what)}"


def step_line(step: Step, history: History, *, total_steps: int) -> str:
    """One training step as one line of plain text."""
    of = f"/{total_steps}" if total_steps > 0 else ""
    parts = [
        f"step {step.step}{of}",
        f"loss {step.get(LOSS):.4f}" if history.supervised else f"reward {step.get(REWARD):.3f}",
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


def eval_line(record: Record) -> str:
    """What an evaluation found, which versions made its tokens where several did, and what was lost (pure)."""
    name, error, versions = record["name"], record.get("error", ""), record.get("versions", {})
    head, score = f"eval {name} at step {record['step']}", record["metrics"].get(f"eval/{name}")
    if score is None:
        return f"{head} failed: {error or 'nothing was measured'}"
    line = f"{head}: {percent(score)} of {record['n_samples']} samples"
    if len(versions) > 1:
        share = record["metrics"][f"eval/{name}/version_share"]
        first, last = min(versions, key=int), max(versions, key=int)
        line += f", {percent(share)} of their tokens by it, the others by versions {first} to {last}"
    return line + (f"; {error}" if error else "")


def plain_line(record: Record, history: History, *, total_steps: int) -> str:
    """The line for one record, empty for what plain output leaves out (pure)."""
    match record["kind"]:
        case "step":
            step = next((s for s in reversed(history.steps) if s.step == record["step"]), None)
            return step_line(step, history, total_steps=total_steps) if isinstance(step, Step) else ""
        case "eval":
            return eval_line(record)
        case "checkpoint":
            return f"checkpoint at step {record['step']} in {duration(record['save_s'])}: {record['path']}"
        case "restored" if record["step"] > 0 or record["checkpoint"]:
            return f"restored to step {record['step']} from {record['checkpoint'] or 'the beginning'}"
        case "knob" if record["epoch"] > 0:
            why = f" ({record['author']}: {record['reason']})" if record.get("reason") else ""
            return f"knob epoch {record['epoch']}: {knob_text(record)}{why}"
        case "fault":
            return f"{record['level']}: {record['actor']}: {record['event']}: {record['text']}"
        case "dead":
            return f"dead letter: {record['stream']} {record['sample']}: {record['error']}"
        case "sample" if len(history.samples) <= FIRST_SAMPLES or _asked_for(history):
            texts = f"{shorten(record['prompt'], 160)} -> {shorten(record['response'], 320)}"
            scored = "" if history.supervised else f", reward {record['reward']:.4g}"
            return f"sample {record['sample']}{scored}: {texts}"
        case "finished":
            return f"finished at step {record['step']}"
    return ""


def _asked_for(history: History) -> bool:
    """--debug-rollout-print-every: the first entry of the knobs has all settings."""
    return bool(history.knobs and history.knobs[0]["values"].get("debug_rollout_print_every"))
