"""The chart of characters: exact lines of a small batch, and ASCII where the stream writes nothing else."""

from __future__ import annotations

import io
from dataclasses import replace

from sample_reports import report

from tf_adapters.report.bars import ASCII, BLOCKS, bars, glyphs_for, legend
from tf_adapters.report.layout import panels_of
from tf_adapters.report.page import Page, as_text

# 90 ms in 27 columns after "rank 0 ": 0.3 columns a millisecond.
WIDTH = 7 + 27


def lines(unicode: bool = False) -> list[str]:
    return [str(line) for line in bars(panels_of(report()), WIDTH, BLOCKS if unicode else ASCII)]


def test_every_rank_is_a_line_on_one_time_axis() -> None:
    assert lines() == [
        "before: nothing frozen: 90.0 ms, bubble 33%",
        "rank 0 0ff1ff......0#####...1#####",
        "rank 1 ...0ff0#####1ff1#####......",
        "after: planned, 62% of the weight gradients skipped: 65.0 ms, bubble 27%",
        "rank 0 0ff1ff...0#####.1--",
        "rank 1 ...0ff0--1ff1+++...",
    ]


def test_unicode_has_the_same_shape() -> None:
    assert lines(unicode=True)[2] == "rank 1 ···0▄▄0█████1▄▄1█████······"
    assert lines(unicode=True)[5] == "rank 1 ···0▄▄0░░1▄▄1▒▒▒···"


def test_narrow_blocks_have_no_number_and_wide_charts_fill_the_line() -> None:
    ten = bars([replace(panel, end_ms=300.0) for panel in panels_of(report())], 17, ASCII)
    assert [str(line) for line in ten][1:3] == ["rank 0 f##.......", "rank 1 ff........"]
    assert all(len(str(line)) <= 150 for line in bars(panels_of(report()), 150, ASCII))


def test_a_stream_that_cannot_encode_blocks_gets_ascii() -> None:
    assert glyphs_for(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) is ASCII
    assert glyphs_for(io.TextIOWrapper(io.BytesIO(), encoding="latin-1")) is ASCII
    assert glyphs_for(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) is BLOCKS
    assert glyphs_for(io.StringIO()) is ASCII


def test_the_legend_explains_what_is_there() -> None:
    assert legend(panels_of(report()), ASCII) == "f forward   # backward, *+- the more is frozen   . idle"


def test_the_chart_is_part_of_the_page() -> None:
    text = as_text(Page("headline", (("status", "fine"),), panels=panels_of(report())), WIDTH)
    assert text.startswith("headline\n\nstatus:   fine\n\nbefore: nothing frozen: 90.0 ms, bubble 33%\nrank 0 0ff1ff")
    assert text.endswith(". idle")
