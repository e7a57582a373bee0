"""Numbers, times and tables as text (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bus.errors import printable

BARS = "▁▂▃▄▅▆▇█"


def human_bytes(n: float) -> str:
    """`0 B`, `12 kB`, `3.4 MB`: powers of 1000."""
    return f"{n:.0f} B" if n < 1000 else _scaled(n, (" kB", " MB", " GB", " TB"))


def human_count(n: float) -> str:
    """`912`, `3.2k`, `1.45M`."""
    return ("-" if n < 0 else "") + (f"{abs(n):.3g}" if abs(n) < 1000 else _scaled(abs(n), ("k", "M", "G", "T")))


def _scaled(n: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        n /= 1000
        if n < 999.5:
            return f"{n:.3g}{unit}"
    return f"{n / 1000:.3g}{units[-1]}"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3:05`, `1:02:09`, `3 d 04:00`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d}:{minutes:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"


def percent(share: float) -> str:
    """`61.3%`."""
    return f"{100 * share:.1f}%"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Aligned columns with a head; columns named in `right` are flush right. The last column is never padded."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines: list[str] = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in zip(head, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` bars: means over equal stretches of `values`, scaled to their range."""
    if not values or width <= 0:
        return ""
    points = compress(values, width)
    bottom, top = min(points), max(points)
    if top <= bottom:
        return BARS[0] * len(points)
    last = len(BARS) - 1
    return "".join(BARS[min(last, max(0, round((p - bottom) / (top - bottom) * last)))] for p in points)


def compress(values: Sequence[float], width: int) -> list[float]:
    """`values` as at most `width` means of neighbours."""
    n = len(values)
    if n <= width:
        return list(values)
    edges = [i * n // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def progress_bar(share: float, width: int) -> str:
    """`━━━━──────` of `width` cells."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "━" * full + "─" * (width - full)


def plural(n: int, noun: str) -> str:
    """`1 group`, `2 groups`, `3 entries`."""
    if n == 1:
        return f"1 {noun}"
    return f"{n} {noun[:-1]}ies" if noun.endswith("y") else f"{n} {noun}s"


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= width else flat[: max(1, width - 1)] + "…"


def is_initial(record: Mapping[str, Any]) -> bool:
    """Whether a record of kind `knob` has all settings, as they stand first on a bus. On one made anew its epoch is above 0."""
    return record.get("author") == "launcher" and record.get("reason") == "initial"


def knob_text(record: Mapping[str, Any]) -> str:
    """What a record of kind `knob` changed, planned for a step, or ended."""
    if is_initial(record):
        return f"all {len(record['values'])} settings, on a bus made anew"
    values = ", ".join(f"{k}={v}" for k, v in (record.get("planned") or record["values"]).items())
    if record.get("planned"):
        return f"planned for step {record['at_step']}: {values}"
    return values or (f"plan of epoch {record['plan']} ended" if "plan" in record else "nothing new")
