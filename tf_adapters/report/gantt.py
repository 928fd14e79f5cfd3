"""Batches as a Gantt chart on one time axis, nothing frozen above. Only drawing imports matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tf_adapters.errors import ConfigError
from tf_adapters.report.gantt_marks import (
    Frame,
    explain,
    labelled_actions,
    mark_end,
    matplotlib_module,
    paint_axes,
    paint_blocks,
    rank_label,
)
from tf_adapters.report.layout import Panel

_NARROW = 9.0  # points: the middle block's width below which a frame around it leaves too little of its colour
_FRAMED_END = 1.1  # inches right of the longest batch for the text at its end


def draw_panels(
    panels: Sequence[Panel],
    headline: str,
    path: str | os.PathLike[str],
    fmt: Literal["png", "svg"] | None = None,
    compared_ms: Sequence[float] | None = None,
) -> None:
    """Draw batches below each other on one time axis into ``path``. ``fmt`` is by default the file's ending.

    The end of each panel is compared with its time in ``compared_ms``, by default with the end of the first panel.
    Raises UnsupportedError without matplotlib, ConfigError for another ending, OSError if ``path`` cannot be written.
    """
    kind = _kind(path, fmt)
    agg, figures = matplotlib_module("backends.backend_agg"), matplotlib_module("figure")
    frame = _frame(panels)
    figure = figures.Figure(figsize=(frame.width, frame.total), dpi=120, facecolor="white")
    agg.FigureCanvasAgg(figure)  # a canvas of its own: pyplot and its backend stay as they are
    _paint(figure, panels, compared_ms or [panels[0].end_ms] * len(panels), frame)
    explain(figure, panels, headline + _sizes(panels), frame)
    _save(figure, path, kind)


def _save(figure: Any, path: str | os.PathLike[str], kind: str) -> None:
    """Write the same bytes for the same chart. Text in SVG stays text, which is smaller and can be searched."""
    if kind == "png":
        figure.savefig(path, format="png", pil_kwargs={"optimize": True})
        return
    with matplotlib_module("").rc_context({"svg.fonttype": "none", "svg.hashsalt": "tf-adapters"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _paint(figure: Any, panels: Sequence[Panel], compared_ms: Sequence[float], frame: Frame) -> None:
    # All panels have numbers, or none has: otherwise numbers that do not fit planned blocks would look forgotten.
    labels = [labelled_actions(panel, frame.points_per_ms) for panel in panels]
    for number, (panel, labelled) in enumerate(zip(panels, labels, strict=True)):
        axes = figure.add_axes(frame.box(number))
        last = number == len(panels) - 1
        paint_blocks(axes, panel, labelled if all(labels) else set(), frame.narrow)
        paint_axes(axes, panel, frame.limit_ms, "time in the batch (ms)" if last else "")
        mark_end(axes, panel, compared_ms[number])


def _frame(panels: Sequence[Panel]) -> Frame:
    longest = max(len(row) for panel in panels for row in panel.rows)
    width = min(20.0, max(11.0, 0.18 * longest))
    names = [rank_label(stages, row) for panel in panels for row, stages in enumerate(panel.stages)]
    left = 0.25 + 0.075 * max(map(len, names))
    span = max(panel.drawn_ms for panel in panels) or 1.0
    across = width - left - Frame.RIGHT
    limit_ms = span * across / (across - _FRAMED_END)
    lengths = sorted(block.end_ms - block.start_ms for panel in panels for block in panel.blocks)
    return Frame(
        width=width,
        left=left,
        heights=tuple(map(_height, panels)),
        limit_ms=limit_ms,
        narrow=lengths[len(lengths) // 2] * across * 72 / limit_ms < _NARROW,
    )


def _height(panel: Panel) -> float:
    rows = len(panel.stages)
    each = 0.5 if rows <= 4 else 0.4 if rows <= 8 else 0.3
    staggered = any(len(stages) > 1 for stages in panel.stages)
    return rows * (max(each, 0.4) if staggered else each)


def _sizes(panels: Sequence[Panel]) -> str:
    """The numbers of ranks and microbatches that all panels share, and a note if ranks have several stages."""
    ranks = {len(panel.stages) for panel in panels}
    microbatches = {max(block.action.microbatch for block in panel.blocks) + 1 for panel in panels}
    words = [(ranks, "pipeline ranks"), (microbatches, "microbatches")]
    known = [f"{next(iter(sizes))} {noun}" for sizes, noun in words if len(sizes) == 1]
    shared = any(len(stages) > 1 for panel in panels for stages in panel.stages)
    return (": " if known else "") + ", ".join(known) + (" (stages of one rank staggered)" if shared else "")


def _kind(path: str | os.PathLike[str], fmt: Literal["png", "svg"] | None) -> str:
    chosen = fmt or Path(path).suffix.lower().lstrip(".")
    if chosen not in ("png", "svg"):
        raise ConfigError(f"cannot draw into {path}: the file must end in .png or .svg")
    return chosen
