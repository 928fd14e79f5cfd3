"""A batch as a Gantt chart of characters: one line per rank, every batch on the same time axis.

A block starts with its microbatch's number where there is room for it. Forwards and input gradients are half as high
as blocks that freezing can shorten. Those are the lighter the more of them is frozen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from tf_adapters.report.layout import Block, Panel
from tf_adapters.schedule.ir import Kind


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a chart. ``frozen`` has those of backwards and weight gradients, from nothing frozen to all."""

    forward: str
    input_grad: str
    frozen: str
    idle: str

    def of(self, block: Block | None) -> str:
        if block is None:
            return self.idle
        if block.action.kind is Kind.FORWARD:
            return self.forward
        if block.action.kind is Kind.INPUT_GRAD:
            return self.input_grad
        steps = len(self.frozen)
        return self.frozen[min(int(max(block.frozen, 0.0) * steps), steps - 1)]


BLOCKS = Glyphs(forward="▄", input_grad="▀", frozen="█▓▒░", idle="·")
ASCII = Glyphs(forward="f", input_grad="i", frozen="#*+-", idle=".")


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of the chart: a label, then a character and the block that it shows (None: idle) per column."""

    label: str
    cells: tuple[tuple[str, Block | None], ...] = ()

    def __str__(self) -> str:
        return (self.label + "".join(character for character, _ in self.cells)).rstrip()


def glyphs_for(stream: TextIO) -> Glyphs:
    """Block characters where the stream can write them, ASCII otherwise."""
    try:
        "".join((BLOCKS.forward, BLOCKS.input_grad, BLOCKS.frozen, BLOCKS.idle)).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError, AttributeError):
        return ASCII
    return BLOCKS


def bars(panels: Sequence[Panel], width: int, glyphs: Glyphs) -> Iterator[ChartLine]:
    """The lines of a chart that is ``width`` characters wide."""
    label = max(len(_label(len(panel.stages) - 1)) for panel in panels)
    columns = max(width - label, 10)
    span = max(panel.drawn_ms for panel in panels) or 1.0
    for panel in panels:
        yield ChartLine(f"{panel.title}: {panel.end_ms:,.1f} ms, bubble {panel.bubble:.0%}")
        for rank, row in enumerate(panel.rows):
            cells = _cells(row, panel.drawn_ms, ms_per_column=span / columns, columns=columns, glyphs=glyphs)
            yield ChartLine(_label(rank).ljust(label), tuple(cells))


def legend(panels: Sequence[Panel], glyphs: Glyphs) -> str:
    """Return the meanings of the characters that the panels use."""
    kinds = {block.action.kind for panel in panels for block in panel.blocks}
    parts = [f"{glyphs.forward} forward"]
    if Kind.INPUT_GRAD in kinds:
        parts.append(f"{glyphs.input_grad} input gradients")
    frozen = any(block.frozen for panel in panels for block in panel.blocks)
    what = "weight gradients" if Kind.BACKWARD not in kinds else "backward"
    parts.append(f"{glyphs.frozen[0]} {what}" + (f", {glyphs.frozen[1:]} the more is frozen" if frozen else ""))
    return "   ".join([*parts, f"{glyphs.idle} idle"])


def _label(rank: int) -> str:
    return f"rank {rank} "


def _cells(
    row: Sequence[Block], end_ms: float, ms_per_column: float, columns: int, glyphs: Glyphs
) -> Iterator[tuple[str, Block | None]]:
    """Return the character of each column, and the block at the middle of the column, if any."""
    visible = [block for block in row if block.end_ms > block.start_ms]
    starts = [block.start_ms for block in visible]
    shown: list[Block | None] = []
    for column in range(columns):
        time = (column + 0.5) * ms_per_column
        position = bisect_right(starts, time) - 1
        shown.append(visible[position] if position >= 0 and time < visible[position].end_ms else None)
    for block, run in groupby(range(columns), key=shown.__getitem__):
        places = list(run)
        if block is None:
            for idle in places:
                yield (glyphs.idle if (idle + 0.5) * ms_per_column < end_ms else " "), None
            continue
        number = str(block.action.microbatch)
        text = number if len(number) < len(places) else ""
        for character in text.ljust(len(places), glyphs.of(block)):
            yield character, block
