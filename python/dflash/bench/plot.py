# SPDX-License-Identifier: Apache-2.0
"""The picture: what is accepted at each position, and tokens a second over load."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.bench.load import ClosedLoop
from dflash.bench.report import drafting, speedup
from dflash.bench.runner import Measurement
from dflash.engine.statistics import Statistics
from dflash.errors import DflashError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two of Okabe and Ito's colours, which the colour-blind can tell apart, also in grey.
WITH_DRAFT, WITHOUT_DRAFT = "#0072B2", "#D55E00"
MAX_LABELLED_BARS = 16


def require_matplotlib() -> None:
    """Raises DflashError, with the command to run, where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise DflashError("--plot needs matplotlib: pip install 'matplotlib>=3.8'")


def write_plot(path: Path, title: str, measurements: Sequence[Measurement]) -> None:
    """A PNG; the panel of positions only where something was drafted."""
    draw(title, measurements).savefig(path, format="png", dpi=150)


def draw(title: str, measurements: Sequence[Measurement]) -> Figure:
    from matplotlib.figure import Figure

    statistics = drafting(measurements)
    num_panels = 2 if statistics.num_drafts else 1
    figure = Figure(figsize=(5.5 * num_panels, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    if statistics.num_drafts:
        _draw_acceptance(panels[0], statistics)
    _draw_throughput(panels[-1], measurements)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_acceptance(axes: Axes, statistics: Statistics) -> None:
    shares = statistics.acceptance_by_position
    positions = range(1, len(shares) + 1)
    bars = axes.bar(positions, shares, color=WITH_DRAFT, width=0.7)
    if len(shares) <= MAX_LABELLED_BARS:
        axes.bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=8, padding=2)
        axes.set_xticks(positions)
    axes.set_ylim(0, 1.05)
    axes.set_title(f"Accepted by position (AL {statistics.acceptance_length:.2f})", fontsize=10)
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of drafts accepted up to here")


def _draw_throughput(axes: Axes, measurements: Sequence[Measurement]) -> None:
    shown = sorted((m for m in measurements if m.complete), key=lambda m: m.load.level)
    levels = sorted({m.load.level for m in shown})
    fastest = max((m.summary.tokens_per_second for m in shown), default=0.0)
    for side in ([m for m in shown if m.with_draft], [m for m in shown if not m.with_draft]):
        if side:
            _draw_side(axes, side, measurements)
    _scale_levels(axes, levels or [1.0])
    axes.set_ylim(0, 1.2 * fastest or 1.0)
    closed = not shown or isinstance(shown[0].load, ClosedLoop)
    axes.set_title("Output tokens a second", fontsize=10)
    axes.set_xlabel("concurrency (requests at once)" if closed else "request rate (requests/s)")
    axes.set_ylabel("tok/s")


def _scale_levels(axes: Axes, levels: list[float]) -> None:
    """Doublings at equal distances, a tick at every level, and room at the right for the lines' names."""
    doublings = max(math.log2(levels[-1] / levels[0]), 0.5)
    axes.set_xscale("log", base=2)
    axes.set_xlim(levels[0] / 2 ** (0.1 * doublings), levels[-1] * 2 ** (0.6 * doublings))
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()


def _draw_side(axes: Axes, side: list[Measurement], measurements: Sequence[Measurement]) -> None:
    """A line with its name at its end; the side with drafter tells its speed-up at every level."""
    with_draft = side[0].with_draft
    color, marker = (WITH_DRAFT, "o") if with_draft else (WITHOUT_DRAFT, "s")
    points = [(m.load.level, m.summary.tokens_per_second) for m in side]
    axes.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=2)
    gains = [speedup(m, measurements) for m in side]
    texts = [f"{gain:.2f}x" if gain is not None else "" for gain in gains]
    texts[-1] = f"{'with' if with_draft else 'without'} drafter {texts[-1]}".strip()
    for text, point in zip(texts[:-1], points[:-1], strict=True):
        _label(axes, text, point, (-6, 6), color, ha="center", va="bottom")
    # The faster side's name stands above its line's end, the other's below: they never meet.
    speed, level = points[-1][1], side[-1].load
    others = [m for m in measurements if m.load == level and m.with_draft != with_draft]
    limit = max((m.summary.tokens_per_second for m in others if m.complete), default=0.0)
    above = speed > limit or (speed == limit and with_draft)
    up, va = (3, "bottom") if above else (-3, "top")
    _label(axes, texts[-1], points[-1], (9, up), color, ha="left", va=va)


def _label(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[int, int],
    color: str,
    ha: str,
    va: str,
) -> None:
    """Text beside a point, `offset` in printer's points; legible over a line too."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]
    axes.annotate(
        text, point, xytext=offset, textcoords="offset points", color=color, fontsize=9,
        ha=ha, va=va, annotation_clip=False, path_effects=halo,
    )  # fmt: skip
