"""A page for the terminal: the same words with and without rich, which frames tables and adds colours."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from itertools import groupby
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


def as_text(page: Page, width: int = _WIDTH, glyphs: Glyphs = ASCII) -> str:
    """The page as plain text; ``width`` is the chart's, in characters."""
    parts = [page.headline, _facts(page), *(f"{table.title}\n{_grid(table)}" for table in page.tables)]
    if page.panels:
        parts.append("\n".join([*map(str, bars(page.panels, width, glyphs)), legend(page.panels, glyphs)]))
    return "\n\n".join(part for part in (*parts, _notes(page)) if part)


def print_page(page: Page, stream: TextIO | None = None) -> None:
    """Print to ``stream`` (standard output); on a terminal with rich in colours."""
    out = stream or sys.stdout
    if not (out.isatty() and _print_rich(page, out)):
        text = as_text(page, terminal_width(), glyphs_for(out))
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


def _grid(table: Table) -> str:
    lines = (table.header, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


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
