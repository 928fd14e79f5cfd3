"""The marks of a Gantt chart: blocks, critical path, batch ends, legend. Only drawing imports matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tf_adapters.errors import UnsupportedError
from tf_adapters.report.colours import BASE, NAMES, shade
from tf_adapters.report.layout import Block, Panel
from tf_adapters.schedule.ir import Action, Kind

_VANISHED: dict[str, Any] = {"marker": "^", "color": "black", "markersize": 5, "linestyle": "none"}
_CRITICAL, _IDLE, _INK, _FAINT = "#d1105a", "#e9e9ec", "#222222", "#8a8a92"
_ROW = 0.84  # share of a row's height that blocks fill
_FOOT = 0.35  # share of a narrow block's height that marks it as critical
_LABEL = 8.0  # points


@dataclass(frozen=True, slots=True)
class Frame:
    """Sizes in inches: the figure's width, the margin left of the panels, and each panel's height.

    ``limit_ms`` is the end of the time axis. ``narrow``: most blocks are too narrow for a frame around them.
    """

    RIGHT: ClassVar[float] = 0.25
    TOP: ClassVar[float] = 0.75
    GAP: ClassVar[float] = 0.45
    BOTTOM: ClassVar[float] = 1.1

    width: float
    left: float
    heights: tuple[float, ...]
    limit_ms: float
    narrow: bool

    @property
    def total(self) -> float:
        return self.TOP + self.BOTTOM + sum(self.heights) + self.GAP * (len(self.heights) - 1)

    @property
    def points_per_ms(self) -> float:
        """The width of a millisecond, in points."""
        return (self.width - self.left - self.RIGHT) * 72 / self.limit_ms

    def box(self, number: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a panel as shares of the figure."""
        bottom = self.total - self.TOP - sum(self.heights[: number + 1]) - self.GAP * number
        across = self.width - self.left - self.RIGHT
        return self.left / self.width, bottom / self.total, across / self.width, self.heights[number] / self.total


def matplotlib_module(name: str) -> Any:
    """``matplotlib.{name}``, or matplotlib itself for "". Raises UnsupportedError that says what to install."""
    try:
        return importlib.import_module(f"matplotlib.{name}".rstrip("."))
    except ImportError:
        raise UnsupportedError("pictures need matplotlib: pip install matplotlib") from None


def rank_label(of_rank: Sequence[int], row: int, most: int = 3) -> str:
    """A row's name: the rank and its stages, or the first two and the last of more than ``most`` stages."""
    stages = [str(stage) for stage in of_rank]
    if len(stages) > most:
        stages = [stages[0], stages[1], "…", stages[-1]]
    return f"rank {row}: stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}" if stages else f"rank {row}"


def labelled_actions(panel: Panel, points_per_ms: float) -> set[Action]:
    """The actions whose blocks are wide enough for a number; none where most are too narrow."""
    fits = {
        block.action
        for block in panel.blocks
        if (block.end_ms - block.start_ms) * points_per_ms >= _LABEL * (0.64 * len(str(block.action.microbatch)) + 0.2)
    }
    return fits if len(fits) >= 0.6 * len(panel.blocks) else set()


def paint_blocks(axes: Any, panel: Panel, labelled: set[Action], narrow: bool) -> None:
    """Paint idle ranks, blocks, the critical path, and microbatch numbers on the actions in ``labelled``."""
    rectangle = matplotlib_module("patches").Rectangle
    idle = [rectangle((0, row - _ROW / 2), panel.drawn_ms, _ROW) for row in range(len(panel.stages))]
    shapes, colours, path = [], [], []
    for block in panel.blocks:
        if block.end_ms <= block.start_ms:
            if block.action.freezable:  # a triangle at the row's foot
                axes.plot(block.start_ms, block.row + _ROW / 2, **_VANISHED, clip_on=False, zorder=6)
            continue  # its edges would be a white line
        top, tall = _box(block, len(panel.stages[block.row]))
        length = block.end_ms - block.start_ms
        shapes.append(rectangle((block.start_ms, top), length, tall))
        colours.append(shade(block.action.kind, block.frozen))
        if block.critical:
            foot = (top + (1 - _FOOT) * tall, _FOOT * tall) if narrow else (top, tall)
            path.append(rectangle((block.start_ms, foot[0]), length, foot[1]))
        if block.action in labelled:
            _label(axes, block, top + tall / 2)
    _add(axes, idle, facecolor=_IDLE, edgecolor="none", zorder=1)
    _add(axes, shapes, facecolors=colours, edgecolor="white", linewidth=0.2 if narrow else 0.5, zorder=2)
    _add(axes, path, zorder=3, **_critical_style(narrow))
    for row in panel.rows if panel.overlap else ():
        start = next((block.start_ms for block in row if block.step), None)
        if start is not None:  # where the rank begins the second step
            ends = row[0].row + 0.62 * _ROW, row[0].row - 0.62 * _ROW
            axes.plot([start, start], ends, color=_INK, linewidth=1.8, clip_on=False, zorder=6)


def _box(block: Block, lanes: int) -> tuple[float, float]:
    """Top and height of a block in rows. Stages that share a rank are staggered, the first one on top."""
    height = _ROW / (1 + 0.35 * (lanes - 1))
    return block.row - _ROW / 2 + 0.35 * height * block.lane, height


def _critical_style(narrow: bool) -> dict[str, Any]:
    """A frame around a block; of narrow blocks, whose colours it would hide, a bar at their foot."""
    if narrow:
        return {"facecolor": _CRITICAL, "edgecolor": "none"}
    return {"facecolor": "none", "edgecolor": _CRITICAL, "linewidth": 1.3}


def _add(axes: Any, shapes: list[Any], **style: Any) -> None:
    """Add the shapes as one collection: thousands of single patches would take minutes."""
    axes.add_collection(matplotlib_module("collections").PatchCollection(shapes, **style))


def _label(axes: Any, block: Block, middle: float) -> None:
    red, green, blue = shade(block.action.kind, block.frozen)
    ink = _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.58 else "white"
    where = ((block.start_ms + block.end_ms) / 2, middle)
    text = str(block.action.microbatch)
    axes.text(*where, text, fontsize=_LABEL, color=ink, ha="center", va="center_baseline", zorder=4)


def paint_axes(axes: Any, panel: Panel, limit_ms: float, time_label: str) -> None:
    """Paint the title, the ranks and the time axis. The time axis has numbers only if it has a label."""
    rows = range(len(panel.stages))
    axes.set(xlim=(0, limit_ms), ylim=(len(rows) - 0.5, -0.5))
    axes.set_title(f"{panel.title}; bubble {panel.bubble:.0%}", loc="left", fontsize=10.5, color=_INK, pad=5)
    axes.set_yticks(rows, [rank_label(panel.stages[row], row) for row in rows], fontsize=9, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, colors=_INK, labelbottom=bool(time_label))
    axes.set_xlabel(time_label, fontsize=10, color=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def mark_end(axes: Any, panel: Panel, unfrozen_ms: float) -> None:
    """Mark the end of the batch or period with its time, compared with ``unfrozen_ms``, which is a dotted line."""
    if panel.end_ms != unfrozen_ms:
        axes.axvline(unfrozen_ms, color=_FAINT, linewidth=0.9, linestyle=":", zorder=0)
    axes.axvline(panel.end_ms, color=_INK, linewidth=1.2, linestyle="--", zorder=5)
    text = f"{panel.end_ms:,.{1 if panel.end_ms < 1000 else 0}f} ms"
    if panel.end_ms != unfrozen_ms and unfrozen_ms > 0:
        change = 1 - panel.end_ms / unfrozen_ms
        text += f"\n{abs(change):.1%} {'saved' if change >= 0 else 'longer'}"
        if panel.end_ms > 0:
            text += f"\n{'step' if panel.overlap else 'batch'} {unfrozen_ms / panel.end_ms:.2f}x"
    note = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
    middle = sum(axes.get_ylim()) / 2
    axes.annotate(text, (panel.drawn_ms, middle), **place, fontsize=10, color=_INK, bbox=note, zorder=6)


def explain(figure: Any, panels: Sequence[Panel], headline: str, frame: Frame) -> None:
    """Add the headline above; below the panels the legend and, if anything is frozen, the bar of freeze ratios."""
    left = frame.left / frame.width
    figure.text(left, 1 - 0.16 / frame.total, headline, va="top", fontsize=12, color=_INK)
    present = {block.action.kind for panel in panels for block in panel.blocks}
    patches, kinds = matplotlib_module("patches"), [kind for kind in Kind if kind in present]
    keys = [patches.Patch(facecolor=BASE[kind], label=NAMES[kind]) for kind in kinds]
    keys.append(patches.Patch(facecolor=_IDLE, label="idle (bubble)"))
    keys.append(patches.Patch(label="critical path", **_critical_style(frame.narrow)))
    if any(b.end_ms <= b.start_ms and b.action.freezable for panel in panels for b in panel.blocks):
        keys.append(matplotlib_module("lines").Line2D([], [], **_VANISHED, label="all frozen: takes no time"))
    figure.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(left, 0.08 / frame.total),
        ncols=4 if len(keys) == 4 else 3,
        fontsize=9,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        labelcolor=_INK,
    )
    if any(block.frozen for panel in panels for block in panel.blocks):
        _ratio_bar(figure, Kind.BACKWARD if Kind.BACKWARD in kinds else Kind.WEIGHT_GRAD, frame)


def _ratio_bar(figure: Any, kind: Kind, frame: Frame) -> None:
    colors, mappable = matplotlib_module("colors"), matplotlib_module("cm").ScalarMappable
    width, total = frame.width, frame.total
    steps = colors.ListedColormap([shade(kind, share / 63) for share in range(64)])
    box = figure.add_axes((1 - (frame.RIGHT + 2.4) / width, 0.36 / total, 2.2 / width, 0.13 / total))
    bar = figure.colorbar(mappable(colors.Normalize(0, 100), steps), cax=box, orientation="horizontal")
    bar.set_ticks([0, 50, 100], labels=["0%", "50%", "100%"], fontsize=8, color=_INK)
    bar.outline.set_visible(False)
    box.set_title("weight gradients skipped", fontsize=9, color=_INK, pad=3)
