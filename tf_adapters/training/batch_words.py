"""Where the ranks' time in a batch goes, in words: for the log and for the page of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tf_adapters.measuring.batch_times import BatchTimes, EdgeTimes
from tf_adapters.schedule.ir import Kind

KINDS = {
    Kind.FORWARD.value: "forwards",
    Kind.BACKWARD.value: "backwards",
    Kind.INPUT_GRAD.value: "input gradients",
    Kind.WEIGHT_GRAD.value: "weight gradients",
}
_EACH_RANK_UP_TO = 8
_PARTS = 3
"""Most stages of a critical path that are named."""
_WORTH_A_WORD = 0.01
"""Least share of the batch that is named."""


def milliseconds(value: float) -> str:
    """A time as the pages print it."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def bubbles(batch: BatchTimes) -> str:
    """Each rank's share of the batch without computing; of many ranks the smallest and the largest."""
    shares = list(enumerate(batch.bubbles))
    if len(shares) > _EACH_RANK_UP_TO:
        least, most = (choose(shares, key=lambda pair: pair[1]) for choose in (min, max))
        return f"from {least[1]:.0%} (rank {least[0]}) to {most[1]:.0%} (rank {most[0]})"
    return ", ".join(f"{share:.0%} (rank {rank})" for rank, share in shares)


def held_by(batch: BatchTimes) -> str:
    """Describe the critical path: the stages that are longest on it, and its time outside of computations."""
    by_stage: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for part in batch.critical_path:
        by_stage[part.stage][part.kind] = part.ms
    longest = sorted(by_stage.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    parts = [
        f"stage {stage} {_of(batch, sum(kinds.values()))} "
        f"({', '.join(f'{KINDS[kind]} {milliseconds(ms)}' for kind, ms in kinds.items())})"
        for stage, kinds in longest[:_PARTS]
    ]
    rest = sum(sum(kinds.values()) for _, kinds in longest[_PARTS:])
    others = {"other stages": rest, "transfers": batch.critical_transfer_ms, "overhead": batch.critical_overhead_ms}
    return "; ".join([*parts, *(f"{name} {_of(batch, ms)}" for name, ms in others.items() if _counts(batch, ms))])


def waits(batch: BatchTimes) -> str | None:
    """Describe the edge with the longest waits and transfers; None where no edge costs much."""
    edge = max(batch.edges, key=lambda e: e.waiting_ms + e.transfer_ms, default=None)
    if edge is None or not _counts(batch, edge.waiting_ms + edge.transfer_ms):
        return None
    return (
        f"stage {edge.target} waits longest for {_sent(edge)}: {milliseconds(edge.waiting_ms)} a batch for their "
        f"computation, {milliseconds(edge.transfer_ms)} for their transfer"
    )


def late_receives(batch: BatchTimes) -> Iterator[str]:
    """Describe the edges whose target rank begins late although its input is there, the worst first."""
    worst = sorted(batch.edges, key=lambda edge: -edge.late_ms)[:_PARTS]
    for edge in (edge for edge in worst if _counts(batch, edge.late_ms)):
        lost = f"{milliseconds(edge.late_ms)} ({_of(batch, edge.late_ms)}) of a batch"
        yield f"stage {edge.target} receives {_sent(edge)} late: for {lost} they had been sent and its rank was free"


def stragglers(batch: BatchTimes, step_ms: float) -> Iterator[str]:
    """Describe replicas that are slower than the others of their stage, and the cost. Empty without replicas."""
    if batch.replicas > 1 and not batch.stragglers:
        spread = f"within {batch.replica_spread:.1%} of the median"
        yield f"none: of a stage's {batch.replicas} replicas the slowest is {spread}"
    for one in batch.stragglers[:_PARTS]:
        above = one.slowest_ms / one.median_ms - 1.0 if one.median_ms else 0.0
        yield (
            f"stage {one.stage} on the job's rank {one.rank} takes {milliseconds(one.slowest_ms)} a microbatch, the "
            f"median of its replicas {milliseconds(one.median_ms)} (+{above:.0%}): {milliseconds(one.cost_ms)} "
            f"({one.cost_ms / step_ms if step_ms else 0.0:.1%}) of a step"
        )


def log_line(batch: BatchTimes, step_ms: float) -> str:
    """Return the most important facts about a batch in one line."""
    slow = list(stragglers(batch, step_ms))[:1] if batch.stragglers else []
    said = [
        f"bubble {batch.bubble:.1%} of a batch of {milliseconds(batch.span_ms)} ({bubbles(batch)})",
        f"critical path: {held_by(batch)}",
        *([text] if (text := waits(batch)) else []),
        *list(late_receives(batch))[:1],
        *(f"straggler: {text}" for text in slow),
    ]
    return ". ".join(said)


def _sent(edge: EdgeTimes) -> str:
    return f"stage {edge.source}'s {KINDS[edge.kind]}"


def _counts(batch: BatchTimes, ms: float) -> bool:
    return ms > 0.0 and ms >= _WORTH_A_WORD * batch.span_ms


def _of(batch: BatchTimes, ms: float) -> str:
    return f"{ms / batch.span_ms if batch.span_ms else 0.0:.0%}"
