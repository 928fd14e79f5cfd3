"""A page for the terminal: the same words with and without rich, which frames tables and adds colours."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, TextIO

from tf_adapters.report.bars import ASCII, ChartLine, Glyphs, bars, glyphs_for, legend
from tf_adapters.report.colours import TERMINAL
from tf_adapters.report.layout import Block, Panel

_WIDTH = 100  # characters on a line of a file or a pipe


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header. All rows have as many cells as the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page before its layout. ``panels`` become one chart."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()


def as_text(page: Page, width: int = _WIDTH, glyphs: Glyphs = ASCII, table_width: int | None = None) -> str:
    """The page as plain text; ``width`` is the chart's, in characters. By default tables are as wide as their text."""
    parts = [page.headline, _facts(page), *(f"{table.title}\n{_grid(table, table_width)}" for table in page.tables)]
    if page.panels:
        parts.append("\n".join([*map(str, bars(page.panels, width, glyphs)), legend(page.panels, glyphs)]))
    return "\n\n".join(part for part in (*parts, _notes(page)) if part)


def print_page(page: Page, stream: TextIO | None = None) -> None:
    """Print to ``stream`` (standard output); on a terminal with rich in colours."""
    out = stream or sys.stdout
    if not (out.isatty() and _print_rich(page, out)):
        width = terminal_width()
        text = as_text(page, width, glyphs_for(out), width if out.isatty() else None)
        encoding = out.encoding or "utf-8"
        # A report may hold characters that the terminal cannot show.
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=out)


def terminal_width() -> int:
    """Characters on a line, from 40 to 200: COLUMNS, the terminal's width, or 100."""
    return min(max(shutil.get_terminal_size((_WIDTH, 24)).columns, 40), 200)


def _facts(page: Page) -> str:
    width = max([9, *(len(name) + 1 for name, _ in page.facts)])
    return "\n".join(f"{name + ':':<{width}} {text}" for name, text in page.facts)


def _notes(page: Page) -> str:
    return "\n".join(f"note: {note}" for note in page.notes)


def _grid(table: Table, width: int | None) -> str:
    lines = (table.header, *table.rows)
    widths = _column_widths(list(zip(*lines, strict=True)), width)
    return "\n".join(text for cells in lines for text in _wrapped(cells, widths))


def _column_widths(columns: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Return each column's width: its longest cell's, or less if ``width`` needs it, but never less than a word's."""
    widths = [max(len(cell) for cell in column) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        wider = [column for column, longest in enumerate(words) if widths[column] > longest]
        if not wider:
            break
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _wrapped(cells: Iterable[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row."""
    wrapped = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield "  ".join(part.rjust(width) for part, width in zip(parts, widths, strict=True))


def _print_rich(page: Page, out: TextIO) -> bool:
    """Print with rich; False, and nothing printed, where rich is not installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out, highlight=False)
    console.print(Text(page.headline, style="bold"))
    console.print(Text("\n" + _facts(page)))
    for table in page.tables:
        console.print("", _rich_table(table))
    if page.panels:
        glyphs = glyphs_for(out)
        chart = [_rich_line(line) for line in bars(page.panels, min(console.width, 200), glyphs)]
        meanings = Text(f"{legend(page.panels, glyphs)}   underlined: critical path")
        console.print("", *chart, meanings, sep="\n", soft_wrap=True)
    if page.notes:
        console.print(Text("\n" + _notes(page)))
    return True


def _rich_table(table: Table) -> Any:
    from rich.table import Table as RichTable

    drawn = RichTable(*table.header, title=table.title, title_justify="left", title_style="")
    for column in drawn.columns:
        column.justify = "right"
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _rich_line(line: ChartLine) -> Any:
    from rich.text import Text

    text = Text(line.label, style="" if line.cells else "bold")
    for style, cells in groupby(line.cells, key=lambda cell: _style(cell[1])):
        text.append("".join(character for character, _ in cells), style=style)
    return text


def _style(block: Block | None) -> str:
    if block is None:
        return "dim"
    colour = TERMINAL[block.action.kind]
    return f"{colour} underline" if block.critical else colour
