"""A run now and under other settings, both simulated with several seeds, as text or as one document (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, stdev
from typing import Any

import msgspec

from actors.runtime.seeds import rng_for
from miles_async.console.text import percent, plural, table
from miles_async.console.whatif.outcome import SimulatedOutcome
from miles_async.console.whatif.record import Recorded, knobs_of
from miles_async.console.whatif.setup import SimulatedKnobs
from miles_async.console.whatif.simulation import Simulation, Stands
from miles_async.settings.catalog import catalog, shown_value
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.flat import Flat
from miles_async.settings.rules import check_rules

STEPS, FEWEST_STEPS, MOST_SAMPLES = 60, 16, 32_000
FINDING = 40  # steps more that do not count where slots are found meanwhile
TRUSTED = 0.05  # relative difference of the run's own step time; above it others were foreseen up to 26 % wrong: a warning


class Figure(msgspec.Struct, frozen=True):
    """Mean over the seeds, and their standard deviation."""

    mean: float
    spread: float


Figures = dict[str, Figure]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`off`: simulated over measured seconds a step of the run as it is, less 1. `changed`: what was asked, by setting: the run's
    value and the other. `then` is empty where nothing was asked."""

    off: float
    steps: int
    measured: dict[str, float]
    simulated: Figures
    changed: dict[str, tuple[Any, Any]]
    then: Figures
    notes: tuple[str, ...]


def changed(recorded: Recorded, patch: Mapping[str, Any]) -> SimulatedKnobs:
    """The run's knobs with a patch. SettingsError with all rules that it breaks."""
    before = recorded.settings
    after, own = before.changed(patch), recorded.knobs
    workers = {name: value for name, value in patch.items() if name == "num_generation_workers"}
    # Where more engines would run is no question here.
    stood, found = {str(error) for error in [*_broken(before), *_broken(before.changed(workers))]}, Refusals()
    found.found = [error for error in _broken(after) if str(error) not in stood]
    found.raise_all()
    workers_then = patch.get("num_generation_workers", own.num_generation_workers)
    return knobs_of(after, workers=workers_then, slots=own.slots, engine_most=recorded.engine_most)


def _broken(settings: Flat) -> list[SettingsError]:
    found = Refusals()
    check_rules(settings, found)
    return found.found


def simulated(recorded: Recorded, knobs: SimulatedKnobs, seeds: int) -> Figures:
    """SettingsError where the run would stand still."""
    bound = knobs.max_weight_staleness * knobs.update_weights_interval
    steps = max(FEWEST_STEPS, min(STEPS, MOST_SAMPLES // knobs.size))
    warm = 8 + 2 * bound + (0 if knobs.auto is None else FINDING)
    outcomes: list[SimulatedOutcome] = []
    for seed in range(seeds):
        chance = rng_for(seed, "whatif")
        groups = recorded.groups(knobs.n_samples_per_prompt, chance)
        try:
            outcomes.append(Simulation(knobs, recorded.pace, groups, chance).play(steps, warm))
        except Stands as stands:
            why = f"the simulated run stands still: its trainer waits for {stands}"
            raise SettingsError(why, remedy="Ask for other settings.") from None
    rows = [_row(outcome) | ({} if knobs.auto is None else {"slots": outcome.slots}) for outcome in outcomes]
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name, 0.0) for row in rows] for name in names}
    return {name: Figure(fmean(found), stdev(found) if len(found) > 1 else 0.0) for name, found in values.items()}


def _row(outcome: Any) -> dict[str, float]:
    """Figures by name; of a step's seconds also steps an hour."""
    apart = ("steps", "error_s", "dropped", "slots")
    plain = {name: value for name, value in msgspec.structs.asdict(outcome).items() if name not in apart}
    dropped = {f"dropped {reason}": share for reason, share in outcome.dropped.items()}
    return {**plain, "steps_per_hour": 3600 / outcome.step_s, "dropped": sum(outcome.dropped.values()), **dropped}


def compare(recorded: Recorded, patch: Mapping[str, Any], *, seeds: int) -> Comparison:
    """SettingsError for a patch that breaks a rule, or under which the run would stand still."""
    then = changed(recorded, patch) if patch else None  # what is refused is refused before anything takes time
    now = simulated(recorded, recorded.knobs, seeds)
    measured = recorded.measured
    return Comparison(
        off=now["step_s"].mean / measured.step_s - 1,
        steps=measured.steps,
        measured=_row(measured),
        simulated=now,
        changed={name: (_own(recorded, name), value) for name, value in patch.items()},
        then=simulated(recorded, then, seeds) if then is not None else {},
        notes=recorded.notes,
    )


def _own(recorded: Recorded, name: str) -> Any:
    return recorded.knobs.num_generation_workers if name == "num_generation_workers" else recorded.settings.values[name]


# -- text ------------------------------------------------------------------------------------------------------------------

ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step_s", "seconds a step", lambda x: f"{x:.3g}"),
    ("steps_per_hour", "steps an hour", lambda x: f"{x:.4g}"),
    ("efficiency", "efficiency", lambda x: f"{x:.3f}"),
    ("wait", "trainer waits", percent),
    ("slots", "engine slots, found by themselves", lambda x: f"{x:.0f}"),
    ("idle", "engine slots idle", percent),
    ("masked", "tokens masked", percent),
    ("mean_age", "mean age", lambda x: f"{x:.2f}"),
    ("max_age", "highest age", lambda x: f"{x:.1f}"),
    ("dropped", "samples dropped", percent),
)


def text(found: Comparison) -> str:
    """How well the run itself is simulated, then a table."""
    lines = [
        f"The run as it is, simulated: {found.simulated['step_s'].mean:.3g} s a step; measured over "
        f"{plural(found.steps, 'step')}: {found.measured['step_s']:.3g} s ({100 * found.off:+.1f} %)"
    ]
    if abs(found.off) > TRUSTED:
        why = "something takes time that is not simulated. Do not trust what follows"
        lines.append(f"Warning: that is more than {100 * TRUSTED:.0f} % off: {why}.")
    lines += [f"Note: {note}" for note in found.notes]
    columns = {"measured": {k: Figure(v, 0.0) for k, v in found.measured.items()}, "simulated": found.simulated}
    if found.then:
        specs = catalog()
        asked = ", ".join(
            f"{name} {shown_value(before, specs[name])} -> {shown_value(after, specs[name])}"
            for name, (before, after) in found.changed.items()
        )
        lines.append(f"Asked: {asked}")
        columns["then"] = found.then
    known = dict.fromkeys(name for figures in columns.values() for name in figures)
    reasons = [name for name in known if name.startswith("dropped ")]
    shown_rows = [row for row in ROWS if row[0] in known]
    rows: list[tuple[str, ...]] = []
    for name, label, shown in (*shown_rows, *((name, f"  {name.partition(' ')[2]}", percent) for name in sorted(reasons))):
        rows.append((label, *(_cell(figures.get(name), shown, name in reasons) for figures in columns.values())))
    lines += ["", table(("", *columns), rows)]
    return "\n".join(lines)


def _cell(figure: Figure | None, shown: Callable[[float], str], zero: bool) -> str:
    if figure is None:
        return shown(0.0) if zero else "-"
    return shown(figure.mean) + (f" ± {shown(figure.spread)}" if figure.spread else "")
