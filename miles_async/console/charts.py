"""Curves of the report as SVG text: straight into the page, whose CSS gives them colours and fonts on light and dark paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from actors.recorder.history import AVG_STALENESS, MAX_STALENESS, REWARD, History, Step
from actors.trainer.spread import BORN, LENGTH, MOST, STRAGGLER
from miles_async.console.figures import moving_average, time_split
from miles_async.console.schedule.observed import Spread
from miles_async.console.text import human_count

SERIES = ("green", "purple", "orange", "red")
HALF, WIDE = (520, 265), (1080, 300)  # pixels of a card's picture
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 24, 38  # margins of axes: numbers and label, nothing, legend, numbers and label
MOST_POINTS = 800  # of one curve; beyond it, the least and the most of each stretch
SPREAD_STEPS = 64
LEAST = 0.002  # share of samples: below this the quantiles of a step say nothing
Show = Callable[[float], str]


def percents(value: float) -> str:
    return f"{100 * value:.3g}%"


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers from low to high, about `most`. `whole`: integers only."""
    rough = max(high - low, 1e-12) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """The points of a curve, of very many those that its outline needs."""
    per = 2 * math.ceil(len(points) / MOST_POINTS)
    for at in range(0, len(points), per):
        part = points[at : at + per]
        yield from part if per <= 2 else sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})


class Axes:
    """One coordinate system. What is drawn is kept in data units until `svg`, when the ranges are known.

    `x_from`, `y_from`, `y_to`: ends that do not follow the data. `log`: the y axis. `whole`: integers at x and y. `names`: words
    at x = 0, 1, ... for numbers.
    """

    def __init__(
        self, x_label: str, y_label: str = "", *, x_from: float | None = None, y_from: float = 0.0, y_to: float | None = None,
        show: Show = "{:g}".format, log: bool = False, whole: tuple[bool, bool] = (True, False), names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.x_label, self.y_label, self.x_from, self.y_from, self.y_to = x_label, y_label, x_from, y_from, y_to
        self.show, self.log, self.whole, self.names = show, log, whole, names
        self.legend: list[tuple[str, str]] = []
        self._curves: list[tuple[list[tuple[float, float]], str, str]] = []
        self._bars: list[tuple[float, float, float, float, str]] = []
        self._upright: list[tuple[float, str]] = []

    def curve(self, xs: Iterable[float], ys: Iterable[float], colour: str, label: str = "", style: str = "") -> None:
        """A line through the points, in style `dots` the points alone; what is not finite is left out."""
        points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        self._curves.append((points, colour, style))
        self._name(colour, label)

    def bar(self, x: float, width: float, low: float, high: float, colour: str, label: str = "") -> None:
        self._bars.append((x, width, low, high, colour))
        self._name(colour, label)

    def mark(self, x: float, style: str) -> None:
        """An upright line through the picture."""
        self._upright.append((x, style))

    def _name(self, colour: str, label: str) -> None:
        if label and (colour, label) not in self.legend:
            self.legend.append((colour, label))

    def values(self) -> list[float]:
        """All heights drawn."""
        return [y for points, _, _ in self._curves for _, y in points] + [b[3] for b in self._bars]

    def svg(self, left: float, width: float, height: float) -> str:
        """As a group whose outer box begins at `left`."""
        xs = [x for points, _, _ in self._curves for x, _ in points]
        xs += [x + side * w / 2 for x, w, _, _, _ in self._bars for side in (-1, 1)] + [x for x, _ in self._upright]
        ys = self.values()
        x0 = min(xs, default=0.0) if self.x_from is None else self.x_from
        x1 = max([*xs, x0 + 1e-9])
        x0, x1 = (x0 - 0.5, x1 + 0.5) if x1 - x0 < 1e-6 else (x0, x1)
        y0 = self.y_from
        y1 = (max([*ys, y0]) + 0.06 * (max([*ys, y0]) - y0) or 1.0) if self.y_to is None else self.y_to
        y1 = y1 if y1 > y0 else y0 + 1.0
        rise = (lambda y: math.log(max(y, y0) / y0) / math.log(y1 / y0)) if self.log else (lambda y: (y - y0) / (y1 - y0))
        box_w, box_h = width - LEFT - RIGHT, height - TOP - BOTTOM

        def px(x: float) -> float:
            return round(left + LEFT + box_w * (x - x0) / (x1 - x0), 1)

        def py(y: float) -> float:
            return round(TOP + box_h * (1 - rise(y)), 1)

        out = []
        for y in (0.01, 0.1, 0.5, 1.0) if self.log else ticks(y0, y1, 6, whole=self.whole[1]):
            out.append(f'<path class="rule" d="M{px(x0)} {py(y)}H{px(x1)}"/>')
            out.append(_text(left + LEFT - 6, py(y) + 4, self.show(y), "end"))
        numbers = ((x, f"{x:g}") for x in ticks(x0, x1, 7 if box_w > 350 else 5, whole=self.whole[0]))
        marks = [(float(i), word) for i, word in enumerate(self.names)] or numbers
        out += [_text(px(x), TOP + box_h + 16, word, "middle") for x, word in marks]
        out += [f'<path class="{style}" d="M{px(x)} {TOP}V{TOP + box_h}"/>' for x, style in self._upright]
        for x, w, low, high, colour in self._bars:
            at, to = px(x - w / 2), px(x + w / 2)
            out.append(f'<path style="fill:var(--{colour})" d="M{at} {py(low)}V{py(high)}H{to}V{py(low)}z"/>')
        for points, colour, style in self._curves:
            if "dots" in style:
                out += [f'<circle r="2" cx="{px(x)}" cy="{py(y)}" style="fill:var(--{colour})"/>' for x, y in points]
            if style != "dots" and points:
                path = " ".join(f"{px(x)},{py(y)}" for x, y in thinned(points))
                out.append(f'<polyline class="curve {style}" style="stroke:var(--{colour})" points="{path}"/>')
        out.append(_text(left + LEFT + box_w / 2, height - 4, self.x_label, "middle"))
        if self.y_label:
            out.append(_text(0, 0, self.y_label, "middle", f' transform="translate({left + 11} {TOP + box_h / 2}) rotate(-90)"'))
        at = left + LEFT
        for colour, label in self.legend:
            out.append(f'<path style="stroke:var(--{colour});stroke-width:3" d="M{at} 9h16"/>' + _text(at + 22, 13, label, "start"))
            at += 40 + 6.2 * len(label)
        return "".join(out)


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def picture(size: tuple[int, int], *axes: Axes) -> str:
    """Inline SVG that fills its box: axes side by side, of equal width."""
    width, height = size
    each = width / len(axes)
    inner = "".join(one.svg(i * each, each, height) for i, one in enumerate(axes))
    return f'<svg role="img" viewBox="0 0 {width} {height}">{inner}</svg>'


def _smooth(values: Sequence[float]) -> list[float]:
    return moving_average(values, max(1, min(20, len(values) // 8)))


def learning(history: History) -> str:
    """Training reward and held-out accuracy, over steps and over wall time."""
    steps, start = history.steps, history.first_wall
    rewards = [s.get(REWARD) for s in steps]
    everything = [*rewards, *(e.score for e in history.evals)]
    shares = all(0.0 <= value <= 1.0 for value in everything)
    low, high = (0.0, 1.02) if shares else (min(everything), max(everything))
    high = high if high > low else low + 1.0
    by_step, by_time = (
        Axes(label, y_from=low, y_to=high, show=percents if shares else "{:g}".format, x_from=begin, whole=(begin is None, False))
        for label, begin in (("step", None), ("minutes since the start", 0.0))
    )
    for axes, xs in ((by_step, [float(s.step) for s in steps]), (by_time, [(s.wall - start) / 60 for s in steps])):
        axes.curve(xs, rewards, "blue", style="faint")
        axes.curve(xs, _smooth(rewards), "blue", "reward of training samples" if axes is by_step else "")
    for colour, name in zip(SERIES * 4, history.eval_names(), strict=False):
        evals = history.evals_of(name)
        scores = [e.score for e in evals]
        by_step.curve([float(e.step) for e in evals], scores, colour, f"{name}, evaluated", style="line dots")
        by_time.curve([(e.wall - start) / 60 for e in evals], scores, colour, style="line dots")
    for record in history.knobs:
        if int(record["epoch"]) > 0:
            by_time.mark((float(record["wall"]) - start) / 60, "knob")
    for record in history.restores[1:]:
        by_time.mark((float(record["wall"]) - start) / 60, "restart")
    return picture(WIDE, by_step, by_time)


def staleness(history: History, bounds: Sequence[tuple[int, int]]) -> str:
    """Mean and largest staleness per step, and the bound; `bounds`: (from step, bound) in order."""
    axes = Axes("step", "policy versions", whole=(True, True))
    xs = [s.step for s in history.steps]
    axes.curve(xs, [s.get(MAX_STALENESS) for s in history.steps], "orange", "largest", style="thin")
    axes.curve(xs, [s.get(AVG_STALENESS) for s in history.steps], "blue", "mean over tokens")
    if bounds and xs:
        ends = [step for step, _ in bounds[1:]] + [xs[-1]]
        for (begin, bound), end in zip(bounds, ends, strict=True):
            axes.curve([max(begin, xs[0]), end], [bound, bound], "grey", "bound", style="dotted")
    axes.y_to = 1.08 * max(1.0, *axes.values())
    return picture(HALF, axes)


def throughput(history: History) -> str:
    """Response tokens trained per second of wall time."""
    timed = [s for s in history.steps if s.gap_s > 0 and not s.resumed]
    rates = [s.get("rollout/tokens") / s.gap_s for s in timed]
    axes = Axes("step", "tokens per second", show=human_count)
    xs = [s.step for s in timed]
    axes.curve(xs, rates, "blue", style="faint")
    axes.curve(xs, _smooth(rates), "blue")
    return picture(HALF, axes)


def time_of_steps(history: History) -> str:
    """Seconds of each step: waiting for rollouts, training, publishing; neighbours are averaged when steps are many."""
    axes = Axes("step", "seconds per step")
    xs, width, rows = _binned(history.steps)
    parts = (("green", "training"), ("orange", "waiting for rollouts"), ("purple", "publishing and saving"))
    for x, row in zip(xs, rows, strict=True):
        low = 0.0
        for (colour, label), value in zip(parts, row, strict=True):
            axes.bar(x, width, low, low + value, colour, label)
            low += value
    return picture(HALF, axes)


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
    axes = Axes("step", "response tokens")
    xs = [s.step for s in history.steps]
    axes.curve(xs, [s.get("rollout/response_len/max") for s in history.steps], "orange", "longest", style="thin")
    axes.curve(xs, _smooth([s.get("rollout/response_len/mean") for s in history.steps]), "blue", "mean")
    return picture(HALF, axes)


def spreads(history: History, bound: int | None) -> str:
    """Lengths, ages of first tokens and stragglers, over the newest steps together."""
    steps = history.steps[-SPREAD_STEPS:]
    log = {"show": percents, "log": True, "y_from": LEAST, "y_to": 1.1}
    by_length = Axes("response tokens", "share above", x_from=0.0, **log)  # type: ignore[arg-type]
    by_group = Axes("slowest member / mean of its group", x_from=1.0, whole=(False, False), **log)  # type: ignore[arg-type]
    for axes, name in ((by_length, LENGTH), (by_group, STRAGGLER)):
        axes.curve(*exceeded([spread for s in steps if (spread := Spread.of(s, name)) is not None]), "blue")
    ages = [f"{n}" for n in range(MOST)] + [f"{MOST}_up"]
    shares = [sum(s.get(f"{BORN}/{age}") for s in steps) / max(1, len(steps)) for age in ages]
    shown = max((i for i, share in enumerate(shares) if share > 0), default=0) + 1
    names = [age.replace("_up", "+") for age in ages[:shown]]
    by_age = Axes("versions from first token to training", "share of samples", show=percents, names=names)
    for i, share in enumerate(shares[:shown]):
        by_age.bar(i, 0.7, 0.0, share, "orange" if bound is not None and i > bound else "blue")
    return picture(WIDE, by_length, by_age, by_group)


def exceeded(spreads: Sequence[Spread], points: int = 200) -> tuple[list[float], list[float]]:
    """(value, share of samples above it) over several spreads together, from 0 to where that is below LEAST."""
    top = max((s.at(1.0) for s in spreads), default=0.0)
    xs = [top * i / points for i in range(points)]
    ys = [1 - sum(s.below(x) for s in spreads) / len(spreads) for x in xs] if spreads else []
    shown = next((i for i, y in enumerate(ys) if y < LEAST), points)
    return [*xs[:shown], xs[shown] if shown < points else top], [*ys[:shown], LEAST]


def drops(by_reason: Sequence[tuple[str, int]], unit: str) -> str:
    """Dropped samples or groups by reason, most first."""
    shown = by_reason[:10]
    most = max(n for _, n in shown)
    beside = 14 + 6.6 * max(len(name) for name, _ in shown)
    rows = []
    for i, (name, n) in enumerate(shown):
        y, long = 6 + 26 * i, (HALF[0] - beside - 80) * n / most
        rows.append(_text(beside - 8, y + 14, name, "end") + _text(beside + long + 6, y + 14, f"{n:,}", "start"))
        rows.append(f'<rect x="{beside:g}" y="{y}" width="{long:.1f}" height="18" style="fill:var(--blue)"/>')
    label = _text(beside, 26 * len(shown) + 22, unit, "start")
    return f'<svg role="img" viewBox="0 0 {HALF[0]} {26 * len(shown) + 30}">{"".join(rows)}{label}</svg>'


def pauses(history: History) -> str:
    """How long each engine stood still for each new version."""
    axes = Axes("step of the version", "pause, ms")
    names = sorted({str(r["actor"]) for r in history.activations})
    for colour, name in zip(("blue", *SERIES) * (len(names) // 5 + 1), names, strict=False):
        mine = [r for r in history.activations if r["actor"] == name]
        label = name if len(names) <= 4 else ""  # more do not fit above it
        axes.curve([int(r["step"]) for r in mine], [1000 * float(r["pause_s"]) for r in mine], colour, label, "dots")
    return picture(HALF, axes)
