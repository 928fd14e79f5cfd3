"""A picture of where each rank's time in a batch goes: a bar for each rank, computing by kind, transfers, waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_adapters.report.batch import batch_of
from tf_adapters.report.colours import BASE, Rgb
from tf_adapters.report.schema import Report
from tf_adapters.schedule.ir import Kind
from tf_adapters.timing.batch_times import RankTimes

__all__ = ["draw_rank_times", "rank_parts"]

Part = tuple[str, Rgb, list[float]]
"""A label, a colour, and ms by rank."""

_TRANSFER, _OVERHEAD, _WAITING = (0.70, 0.23, 0.28), (0.85, 0.60, 0.62), (0.87, 0.87, 0.87)


def draw_rank_times(figure: Any, report: Report) -> None:
    """Draw the bars; the report has times. What freezing saves of a backward is its weight gradient."""
    batch = batch_of(report)
    assert batch is not None
    ranks = range(len(batch.ranks))
    figure.set_size_inches(7.5, 1.6 + 0.35 * len(batch.ranks))
    axes = figure.add_subplot()
    left = [0.0] * len(batch.ranks)
    for label, colour, values in rank_parts(report, batch.ranks):
        if any(value >= 0.002 * batch.span_ms for value in values):
            axes.barh(ranks, values, left=left, color=colour, label=label, height=0.7)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    for rank, bubble in enumerate(batch.bubbles):
        axes.annotate(f" {bubble:.0%}", (batch.span_ms, rank), va="center", fontsize=8)
    axes.set_title(f"a rank's batch of {batch.span_ms:,.1f} ms with nothing frozen; right: its bubble", fontsize=9)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1.08 * batch.span_ms)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def rank_parts(report: Report, ranks: Sequence[RankTimes]) -> list[Part]:
    """What the bars are made of, from the left; of each rank they add up to the batch."""
    shares = _input_shares(report, len(ranks))
    forward = [rank.compute_ms.get("F", 0.0) for rank in ranks]
    whole = [rank.compute_ms.get("B", 0.0) for rank in ranks]
    # Where freezing was not measured a backward stays in one piece.
    known = [0.0 if share is None else ms for ms, share in zip(whole, shares, strict=True)]
    inputs = [ms * (share or 0.0) for ms, share in zip(known, shares, strict=True)]
    return [
        ("forward", BASE[Kind.FORWARD], forward),
        ("backward", BASE[Kind.BACKWARD], [ms - of for ms, of in zip(whole, known, strict=True)]),
        (
            "input gradient",
            BASE[Kind.INPUT_GRAD],
            [rank.compute_ms.get("I", 0.0) + ms for rank, ms in zip(ranks, inputs, strict=True)],
        ),
        (
            "weight gradient",
            BASE[Kind.WEIGHT_GRAD],
            [rank.compute_ms.get("W", 0.0) + of - ms for rank, of, ms in zip(ranks, known, inputs, strict=True)],
        ),
        ("transfers", _TRANSFER, [rank.transfer_ms for rank in ranks]),
        ("overhead, late receives", _OVERHEAD, [rank.overhead_ms for rank in ranks]),
        ("waiting for other ranks", _WAITING, [rank.waiting_ms for rank in ranks]),
    ]


def _input_shares(report: Report, ranks: int) -> list[float | None]:
    """By rank, the share of its whole backwards that is left with everything frozen; None where none saves anything."""
    schedule = report.schedule.parse()
    shares: list[float | None] = []
    for row in schedule.ranks[:ranks]:
        pairs = [report.times[str(a)] for a in row if a.kind is Kind.BACKWARD and str(a) in report.times]
        least, most = (sum(pair[which] for pair in pairs) for which in (0, 1))
        shares.append(least / most if 0.0 <= least < most else None)
    return shares + [None] * (ranks - len(shares))
