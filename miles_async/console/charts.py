"""Curves of the report as SVG text, with matplotlib and no display.

Colours are drawn as markers and replaced by CSS variables of the page, so that one picture is readable on light and on
dark paper; text stays text and takes the font of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from actors.recorder.history import AVG_STALENESS, MAX_STALENESS, REWARD, History, Step
from actors.trainer.spread import BORN, LENGTH, MOST, STRAGGLER
from miles_async.console.figures import moving_average, time_split
from miles_async.console.schedule.observed import Spread
from miles_async.console.text import human_count

# marker colour in the drawing -> CSS value in the page
BLUE, GREEN, ORANGE, PURPLE, RED, GREY = "#010101", "#010102", "#010103", "#010104", "#010105", "#010106"
INK, LINE = "#010107", "#010108"
_CSS = {
    BLUE: "var(--blue)",
    GREEN: "var(--green)",
    ORANGE: "var(--orange)",
    PURPLE: "var(--purple)",
    RED: "var(--red)",
    GREY: "var(--grey)",
    INK: "var(--soft)",
    LINE: "var(--line)",
}
SERIES = (GREEN, PURPLE, ORANGE, RED)
# Ids that repeat from picture to picture; those of clip paths and markers are referred to and carry the salt.
_IDS = re.compile(r'\bid="(?:figure|axes|patch|line2d|text|[xy]tick|matplotlib\.axis|legend|\w+Collection)_\d+"')
HALF, WIDE = (5.2, 2.75), (10.8, 3.1)
SPREAD_STEPS = 64
LEAST = 0.002  # share of samples: below this the quantiles of a step say nothing
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.color": LINE,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def to_svg(figure: Figure, name: str) -> str:
    """Inline SVG that fills its box. `name` keeps ids of several pictures apart and the output the same every time."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = _IDS.sub("", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for colour, css in _CSS.items():
        svg = svg.replace(colour, css)
    return svg.replace("<svg", '<svg role="img"', 1).strip()


def _figure(size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, sharey=columns > 1)[0]
    return figure, list(axes)


def _legend(axis: Any, columns: int = 3) -> None:
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0, handlelength=1.4)


def _steps_axis(axis: Any, label: str = "step") -> None:
    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.margins(x=0.01)


def _smooth(values: Sequence[float]) -> list[float]:
    return moving_average(values, max(1, min(20, len(values) // 8)))


def learning(history: History) -> str:
    """Training reward and held-out accuracy, over steps and over wall time."""
    with matplotlib.rc_context(STYLE):
        figure, (by_step, by_time) = _figure(WIDE, 2)
        steps, start = history.steps, history.first_wall
        rewards = [s.get(REWARD) for s in steps]
        for axis, xs in ((by_step, [float(s.step) for s in steps]), (by_time, [(s.wall - start) / 60 for s in steps])):
            axis.plot(xs, rewards, color=BLUE, linewidth=0.8, alpha=0.35)
            axis.plot(xs, _smooth(rewards), color=BLUE, label="reward of training samples")
        for colour, name in zip(SERIES * 4, history.eval_names(), strict=False):
            evals = history.evals_of(name)
            scores = [e.score for e in evals]
            for axis, ex in (
                (by_step, [float(e.step) for e in evals]),
                (by_time, [(e.wall - start) / 60 for e in evals]),
            ):
                axis.plot(ex, scores, color=colour, marker="o", markersize=4, label=f"{name}, evaluated")
        for record in history.knobs:
            if int(record["epoch"]) > 0:
                by_time.axvline((float(record["wall"]) - start) / 60, color=GREY, linewidth=1, linestyle=":")
        for record in history.restores[1:]:
            by_time.axvline((float(record["wall"]) - start) / 60, color=RED, linewidth=1, linestyle="--")
        if all(0.0 <= value <= 1.0 for value in (*rewards, *(e.score for e in history.evals))):
            by_step.set_ylim(0, 1.02)
            by_step.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _steps_axis(by_step)
        by_time.set_xlabel("minutes since the start")
        by_time.margins(x=0.01)
        by_time.set_xlim(left=0)
        _legend(by_step, 2)
        return to_svg(figure, "learning")


def staleness(history: History, bounds: Sequence[tuple[int, int]]) -> str:
    """Mean and largest staleness per step, and the bound; `bounds`: (from step, bound) in order."""
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = _figure(HALF)
        xs = [s.step for s in history.steps]
        axis.plot(xs, [s.get(MAX_STALENESS) for s in history.steps], color=ORANGE, linewidth=1, label="largest")
        axis.plot(xs, [s.get(AVG_STALENESS) for s in history.steps], color=BLUE, label="mean over tokens")
        if bounds and xs:
            ends = [step for step, _ in bounds[1:]] + [xs[-1]]
            for i, ((begin, bound), end) in enumerate(zip(bounds, ends, strict=True)):
                label = "bound" if i == 0 else None
                axis.plot([max(begin, xs[0]), end], [bound, bound], color=GREY, linestyle=":", label=label)
        top = max([s.get(MAX_STALENESS) for s in history.steps] + [float(bound) for _, bound in bounds], default=1.0)
        axis.set_ylim(0, 1.08 * max(1.0, top))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel("policy versions")
        _steps_axis(axis)
        _legend(axis)
        return to_svg(figure, "staleness")


def throughput(history: History) -> str:
    """Response tokens trained per second of wall time."""
    timed = [s for s in history.steps if s.gap_s > 0 and not s.resumed]
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = _figure(HALF)
        rates = [s.get("rollout/tokens") / s.gap_s for s in timed]
        xs = [s.step for s in timed]
        axis.plot(xs, rates, color=BLUE, linewidth=0.8, alpha=0.35)
        axis.plot(xs, _smooth(rates), color=BLUE)
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
        axis.set_ylabel("tokens per second")
        _steps_axis(axis)
        return to_svg(figure, "throughput")


def time_of_steps(history: History) -> str:
    """Seconds of each step: waiting for rollouts, training, publishing; neighbours are averaged when steps are many."""
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = _figure(HALF)
        xs, width, rows = _binned(history.steps)
        bottom = [0.0] * len(xs)
        for i, (label, colour) in enumerate(
            (("training", GREEN), ("waiting for rollouts", ORANGE), ("publishing and saving", PURPLE))
        ):
            values = [row[i] for row in rows]
            axis.bar(xs, values, width=width, bottom=bottom, color=colour, label=label, linewidth=0)
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        axis.set_ylabel("seconds per step")
        _steps_axis(axis)
        _legend(axis)
        return to_svg(figure, "time")


def _binned(steps: Sequence[Step], most: int = 100) -> tuple[list[float], float, list[tuple[float, float, float]]]:
    """Middle of each bin, bar width, and mean (train, wait, publish) seconds per step in it."""
    per = max(1, -(-len(steps) // most))
    xs: list[float] = []
    rows: list[tuple[float, float, float]] = []
    for at in range(0, len(steps), per):
        part = steps[at : at + per]
        splits = [time_split(s) for s in part]
        xs.append((part[0].step + part[-1].step) / 2)
        n = len(part)
        rows.append(
            (
                sum(s.train_s for s in splits) / n,
                sum(s.wait_s for s in splits) / n,
                sum(s.publish_s for s in splits) / n,
            )
        )
    return xs, per * 0.9, rows


def lengths(history: History) -> str:
    """Mean and longest response of each step."""
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = _figure(HALF)
        xs = [s.step for s in history.steps]
        axis.plot(
            xs, [s.get("rollout/response_len/max") for s in history.steps], color=ORANGE, linewidth=1, label="longest"
        )
        mean = [s.get("rollout/response_len/mean") for s in history.steps]
        axis.plot(xs, _smooth(mean), color=BLUE, label="mean")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("response tokens")
        _steps_axis(axis)
        _legend(axis)
        return to_svg(figure, "lengths")


def spreads(history: History, bound: int | None) -> str:
    """Lengths, ages of first tokens and stragglers, over the newest steps together."""
    steps = history.steps[-SPREAD_STEPS:]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=WIDE, layout="constrained")
        by_length, by_age, by_group = figure.subplots(1, 3)
        for axis, name, label in (
            (by_length, LENGTH, "response tokens"),
            (by_group, STRAGGLER, "slowest member / mean of its group"),
        ):
            xs, ys = exceeded([spread for s in steps if (spread := Spread.of(s, name)) is not None])
            axis.plot(xs, ys, color=BLUE)
            axis.set_yscale("log")
            axis.set_ylim(LEAST, 1.1)
            axis.yaxis.set_major_locator(FixedLocator([0.01, 0.1, 0.5, 1.0]))
            axis.yaxis.set_minor_locator(FixedLocator([]))
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axis.set_xlabel(label)
        by_length.set_ylabel("share above")
        by_length.set_xlim(left=0)
        by_group.set_xlim(left=1)
        ages = [f"{n}" for n in range(MOST)] + [f"{MOST}_up"]
        shares = [sum(s.get(f"{BORN}/{age}") for s in steps) / max(1, len(steps)) for age in ages]
        shown = max((i for i, share in enumerate(shares) if share > 0), default=0) + 1
        late = [bound is not None and i > bound for i in range(shown)]
        by_age.bar(range(shown), shares[:shown], color=[ORANGE if x else BLUE for x in late], width=0.7, linewidth=0)
        by_age.xaxis.set_major_locator(FixedLocator(list(range(shown))))
        by_age.set_xticklabels([age.replace("_up", "+") for age in ages[:shown]])
        by_age.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        by_age.set_xlabel("versions from first token to training")
        by_age.set_ylabel("share of samples")
        return to_svg(figure, "spreads")


def exceeded(spreads: Sequence[Spread], points: int = 200) -> tuple[list[float], list[float]]:
    """(value, share of samples above it) over several spreads together, from 0 to where that is below LEAST."""
    top = max((s.at(1.0) for s in spreads), default=0.0)
    xs = [top * i / points for i in range(points)]
    ys = [1 - sum(s.below(x) for s in spreads) / len(spreads) for x in xs] if spreads else []
    shown = next((i for i, y in enumerate(ys) if y < LEAST), points)
    return [*xs[:shown], xs[shown] if shown < points else top], [*ys[:shown], LEAST]


def drops(by_reason: Sequence[tuple[str, int]], unit: str) -> str:
    """Dropped samples or groups by reason, most first."""
    shown = list(by_reason[:10])[::-1]
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, (axis,) = _figure((HALF[0], max(1.2, 0.6 + 0.3 * len(shown))))
        bars = axis.barh([name for name, _ in shown], [n for _, n in shown], color=BLUE, height=0.6, linewidth=0)
        axis.bar_label(bars, labels=[f" {n:,}" for _, n in shown], color=INK, fontsize=8.5)
        axis.margins(x=0.14)
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.set_xlabel(unit)
        return to_svg(figure, "drops")


def pauses(history: History) -> str:
    """How long each engine stood still for each new version."""
    with matplotlib.rc_context(STYLE):
        figure, (axis,) = _figure(HALF)
        names = sorted({str(r["actor"]) for r in history.activations})
        for colour, name in zip((BLUE, ORANGE, GREEN, PURPLE, RED) * (len(names) // 5 + 1), names, strict=False):
            mine = [r for r in history.activations if r["actor"] == name]
            label = name if len(names) <= 6 else None
            ys = [1000 * float(r["pause_s"]) for r in mine]
            axis.plot([int(r["step"]) for r in mine], ys, ".", color=colour, markersize=4, alpha=0.8, label=label)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("pause, ms")
        _steps_axis(axis, "step of the version")
        if len(names) <= 6:
            _legend(axis, 4)
        return to_svg(figure, "pauses")
