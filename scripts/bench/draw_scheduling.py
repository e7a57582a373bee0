"""The picture in docs/scheduling.md: one group's life under the bound.

python -m scripts.bench draw_scheduling docs/scheduling.svg
"""

from __future__ import annotations

import sys

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

BOUND = 2
STARTS = 0.25  # in steps, as all times here
ENDS = (0.8, 1.15, 1.45, 1.8, 2.55, 4.4)
VERSIONS = ("#2563c9", "#4f83d6", "#79a3e3", "#a2c0ee", "#c6d9f7")  # the older, the darker
INK, SOFT, LINE, GREEN, ORANGE = "#1c2430", "#5c6675", "#dfe3e8", "#14804f", "#c05c10"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "scheduling", "font.family": "sans-serif", "font.size": 10, "text.color": INK,
    "hatch.linewidth": 1.2,
}  # fmt: skip


def draw() -> Figure:
    """Members from top to bottom, time from left to right; a version lasts one step."""
    figure = Figure(figsize=(9.6, 4.3), layout="constrained", facecolor="white")
    axis = figure.subplots()
    rows = len(ENDS)
    for step in range(rows):
        axis.plot([step, step], [-0.35, rows + 0.55], color=LINE, linewidth=1, zorder=0)
        if step < 5:
            axis.text(step + 0.5, rows + 0.38, f"version {step}", ha="center", color=SOFT)
    for number, end in enumerate(ENDS):
        bottom = rows - 1 - number
        trained = max(BOUND, -int(-end // 1))  # the first step that can take it, and on the last turn at the earliest
        for version in range(int(end) + 1):
            left, right = max(STARTS, version), min(end, version + 1)
            if right <= left:
                continue
            old = trained - version > BOUND
            axis.add_patch(
                Rectangle(
                    (left, bottom + 0.18), right - left, 0.5, facecolor="white" if old else VERSIONS[version],
                    edgecolor=ORANGE if old else "white", hatch="////" if old else None, linewidth=1.0,
                )
            )  # fmt: skip
        axis.plot([end, trained], [bottom + 0.43] * 2, color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
        axis.plot([trained], [bottom + 0.43], marker="o", markersize=8, color=GREEN, zorder=3)
        axis.text(-0.08, bottom + 0.43, f"member {number + 1}", ha="right", va="center", color=SOFT)
    axis.text(
        BOUND + 0.22, rows - 1.15,
        "last turn: four are done and are trained now;\na step later their first tokens would be too old", color=GREEN, va="center",
    )  # fmt: skip
    axis.text(3.15, 1.43, "trained when it is done,\nagainst the rewards of those four", color=GREEN, va="center")
    axis.text(0.62, -0.17, "hatched: over the bound when trained, masked", color=ORANGE, va="center")
    axis.text(5.1, 0.43, "trained", color=GREEN, va="center")
    axis.set_xlim(-0.75, 5.65)
    axis.set_ylim(-0.45, rows + 0.65)
    axis.axis("off")
    return figure


def main() -> int:
    with matplotlib.rc_context(STYLE):
        draw().savefig(sys.argv[1], dpi=110, metadata={"Date": None} if sys.argv[1].endswith("svg") else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
