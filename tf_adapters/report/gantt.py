"""One batch as a Gantt chart: nothing frozen above, planned below, on one time axis.

Only ``draw`` imports matplotlib.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Literal

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.ir import Action, Kind, PipelineSchedule
from tf_adapters.report.layout import Block, Panel, after, before
from tf_adapters.report.schema import Report

__all__ = ["draw"]

_BASE = {
    Kind.FORWARD: (0.22, 0.42, 0.72),
    Kind.BACKWARD: (0.13, 0.53, 0.33),
    Kind.INPUT_GRAD: (0.08, 0.60, 0.62),
    Kind.WEIGHT_GRAD: (0.72, 0.47, 0.10),
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward, input gradients",
    Kind.WEIGHT_GRAD: "backward, weight gradients",
}
_CRITICAL, _IDLE, _INK, _FAINT = "#d1105a", "#e9e9ec", "#222222", "#8a8a92"
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 1.5, 0.25, 0.75, 0.45, 1.1  # inches around and between the panels
_ROW = 0.84  # share of a row's height that blocks fill
_LABEL = 8.0  # points

Rgb = tuple[float, float, float]


def draw(report: Report, path: str | os.PathLike[str], fmt: Literal["png", "svg"] | None = None) -> None:
    """Draw the report's batch into ``path``, as ``fmt`` or what the file's ending says.

    Raises UnsupportedError without matplotlib and ConfigError when the report has nothing to draw.
    """
    kind = fmt or Path(path).suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ConfigError(f"cannot draw into {path}: the file must end in .png or .svg")
    agg, mpl_figure = _matplotlib("backends.backend_agg"), _matplotlib("figure")
    first = before(report)
    second = after(report)
    panels = [first] if second is None else [first, second]
    schedule = report.schedule.parse()
    width, heights = _size(schedule)
    total = _TOP + _BOTTOM + heights * len(panels) + _GAP * (len(panels) - 1)
    figure = mpl_figure.Figure(figsize=(width, total), dpi=120, facecolor="white")
    agg.FigureCanvasAgg(figure)  # a canvas of its own: pyplot and its backend stay as they are
    span = max(panel.end_ms for panel in panels) or 1.0
    # Room right of the longest batch for the text at its end.
    limit = span * (1 + 1.0 / (width - _LEFT - _RIGHT - 1.0))
    points_per_ms = (width - _LEFT - _RIGHT) * 72 / limit
    # Numbers in both panels or in neither: what the planned blocks have no room for would look left out.
    labels = [_labelled(panel, points_per_ms) for panel in panels]
    for number, panel in enumerate(panels):
        bottom = total - _TOP - heights * (number + 1) - _GAP * number
        box = (_LEFT / width, bottom / total, 1 - (_LEFT + _RIGHT) / width, heights / total)
        axes = figure.add_axes(box)
        _paint(axes, panel, schedule, limit, labels[number] if all(labels) else set())
        _mark_end(axes, panel, first.end_ms)
        axes.tick_params(labelbottom=panel is panels[-1])
    axes.set_xlabel("time in the batch (ms)", fontsize=10, color=_INK)
    figure.text(_LEFT / width, 1 - 0.16 / total, _headline(report, schedule), va="top", fontsize=12, color=_INK)
    _explain(figure, first, total, width)
    figure.savefig(path, format=kind)


def _matplotlib(name: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError:
        raise UnsupportedError('pictures need matplotlib: pip install "tf-adapters[plot]"') from None


def _size(schedule: PipelineSchedule) -> tuple[float, float]:
    """Width of the figure and height of one panel in inches."""
    longest = max(len(actions) for actions in schedule.ranks)
    rows = len(schedule.ranks)
    return min(20.0, max(11.0, 0.18 * longest)), rows * (0.5 if rows <= 4 else 0.4 if rows <= 8 else 0.3)


def _headline(report: Report, schedule: PipelineSchedule) -> str:
    size = f"{len(schedule.ranks)} pipeline ranks, {schedule.num_microbatches} microbatches"
    shared = any(len(schedule.stages_of(row)) > 1 for row in range(len(schedule.ranks)))
    lanes = " (stages of one rank staggered)" if shared else ""
    return f"One training batch on {report.host.name}: {size}{lanes}"


def _shade(kind: Kind, frozen: float) -> Rgb:
    """The kind's colour, the lighter the more is frozen; never white, which would read as nothing there."""
    mix = 0.72 * min(max(frozen, 0.0), 1.0)
    red, green, blue = _BASE[kind]
    return (red + (1 - red) * mix, green + (1 - green) * mix, blue + (1 - blue) * mix)


def _box(block: Block, lanes: int) -> tuple[float, float]:
    """Top and height of a block in rows. Stages that share a rank are staggered, the first one on top."""
    height = _ROW / (1 + 0.35 * (lanes - 1))
    return block.row - _ROW / 2 + 0.35 * height * block.lane, height


def _paint(axes: Any, panel: Panel, schedule: PipelineSchedule, limit: float, labelled: set[Action]) -> None:
    collections, patches = _matplotlib("collections"), _matplotlib("patches")
    rows = len(schedule.ranks)
    idle = [patches.Rectangle((0, row - _ROW / 2), panel.end_ms, _ROW) for row in range(rows)]
    axes.add_collection(collections.PatchCollection(idle, facecolor=_IDLE, edgecolor="none", zorder=1))
    shapes: list[Any] = []
    for block in panel.blocks:
        top, tall = _box(block, len(schedule.stages_of(block.row)))
        shapes.append(patches.Rectangle((block.start_ms, top), block.end_ms - block.start_ms, tall))
        if block.action in labelled:
            _label(axes, block, top + tall / 2)
    colours = [_shade(block.action.kind, block.frozen) for block in panel.blocks]
    # One collection for all blocks: thousands of single patches would take minutes.
    axes.add_collection(
        collections.PatchCollection(shapes, facecolors=colours, edgecolor="white", linewidth=0.5, zorder=2)
    )
    path = [shape for shape, block in zip(shapes, panel.blocks, strict=True) if block.critical]
    axes.add_collection(
        collections.PatchCollection(path, facecolor="none", edgecolor=_CRITICAL, linewidth=1.3, zorder=3)
    )
    axes.set(xlim=(0, limit), ylim=(rows - 0.5, -0.5))
    axes.set_title(panel.title, loc="left", fontsize=10.5, color=_INK, pad=5)
    axes.set_yticks(range(rows), [_rank_label(schedule, row) for row in range(rows)], fontsize=9, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(axes: Any, block: Block, middle: float) -> None:
    red, green, blue = _shade(block.action.kind, block.frozen)
    ink = _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.58 else "white"
    axes.text(
        (block.start_ms + block.end_ms) / 2,
        middle,
        str(block.action.microbatch),
        fontsize=_LABEL,
        color=ink,
        ha="center",
        va="center_baseline",
        zorder=4,
    )


def _labelled(panel: Panel, points_per_ms: float) -> set[Action]:
    """The actions whose blocks are wide enough for a number; none where most are too narrow."""
    fits = {
        block.action
        for block in panel.blocks
        if (block.end_ms - block.start_ms) * points_per_ms >= _LABEL * (0.64 * len(str(block.action.microbatch)) + 0.2)
    }
    return fits if len(fits) >= 0.6 * len(panel.blocks) else set()


def _rank_label(schedule: PipelineSchedule, row: int) -> str:
    stages = [str(stage) for stage in schedule.stages_of(row)]
    if len(stages) > 3:
        stages = [stages[0], stages[1], "…", stages[-1]]
    return f"rank {row}: stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}" if stages else f"rank {row}"


def _mark_end(axes: Any, panel: Panel, unfrozen_ms: float) -> None:
    if panel.end_ms != unfrozen_ms:
        axes.axvline(unfrozen_ms, color=_FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.axvline(panel.end_ms, color=_INK, linewidth=1.2, linestyle="--", zorder=5)
    text = f"{panel.end_ms:,.{1 if panel.end_ms < 1000 else 0}f} ms"
    if panel.end_ms != unfrozen_ms and unfrozen_ms > 0:
        change = 1 - panel.end_ms / unfrozen_ms
        text += f"\n{abs(change):.1%} {'saved' if change >= 0 else 'longer'}"
    middle = sum(axes.get_ylim()) / 2
    note = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.annotate(
        text,
        (panel.end_ms, middle),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=10,
        color=_INK,
        va="center",
        bbox=note,
        zorder=6,
    )


def _explain(figure: Any, panel: Panel, total: float, width: float) -> None:
    """The legend and the bar of freeze ratios, in the strip below the panels."""
    patches, colors, cm = _matplotlib("patches"), _matplotlib("colors"), _matplotlib("cm")
    kinds = [kind for kind in Kind if any(block.action.kind is kind for block in panel.blocks)]
    keys = [patches.Patch(facecolor=_BASE[kind], label=_NAMES[kind]) for kind in kinds]
    keys.append(patches.Patch(facecolor=_IDLE, label="idle (bubble)"))
    keys.append(patches.Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.3, label="critical path"))
    figure.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(_LEFT / width, 0.08 / total),
        ncols=4 if len(keys) == 4 else 3,
        fontsize=9,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        labelcolor=_INK,
    )
    kind = Kind.BACKWARD if Kind.BACKWARD in kinds else Kind.WEIGHT_GRAD
    steps = colors.ListedColormap([_shade(kind, share / 63) for share in range(64)])
    box = figure.add_axes((1 - (_RIGHT + 2.4) / width, 0.36 / total, 2.2 / width, 0.13 / total))
    bar = figure.colorbar(cm.ScalarMappable(colors.Normalize(0, 100), steps), cax=box, orientation="horizontal")
    bar.set_ticks([0, 50, 100], labels=["0%", "50%", "100%"], fontsize=8, color=_INK)
    bar.outline.set_visible(False)
    box.set_title("weight gradients skipped", fontsize=9, color=_INK, pad=3)
