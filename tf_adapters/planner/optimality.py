"""A proven limit of a plan's distance from the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tf_adapters.planner.program import Floats, FreezeProgram, Optimum
from tf_adapters.schedule.dag import PipelineDag


def optimality_gap(program: FreezeProgram, optimum: Optimum, target: float = 0.0) -> float:
    """The largest share by which other ratios within the budgets might shorten the span, down to ``target`` at most."""
    planned = program.span(optimum.ratios)
    bound = max(lower_bound(program, optimum), target)
    return max(0.0, (planned - bound) / planned) if planned > 0.0 else 0.0


def lower_bound(program: FreezeProgram, optimum: Optimum) -> float:
    """A span that no freeze ratios within the budgets can beat, in the program's unit.

    One unit of flow from the batch's start to its end is a weighted mean of paths, and the batch takes at least the
    flow's length. This length is the sum of flow * (upper + delay), less the most that freezing can save on the flow.
    If steps overlap, the flow circulates through the loops, one unit over all loops together. The period is then at
    least its length. For every u >= 0, a stage saves at most u * budget + the sum of
    most * max(0, range * throughflow - u), because no action freezes more than its ``most``. The flow follows
    the solver's dual values, but it is made to conserve exactly. The bound therefore holds even if the dual values are
    rough.
    """
    dag = program.dag
    through, over_edges, over_loops = _conserved(program, optimum)
    length = float(through @ program.upper + over_edges @ dag.edges.delay + over_loops @ dag.loops.delay)
    saving = through * program.ranges
    most_saved = sum(
        _most_saved(saving[p], program.most[p], program.budgets[stage]) for stage, p in program.stages.items()
    )
    return max(length - most_saved, program.span(program.most), 0.0)


def _most_saved(saving: Floats, most: Floats, budget: float) -> float:
    descending = np.argsort(-saving, kind="stable")
    whole = int(np.searchsorted(np.cumsum(most[descending]), budget, side="right"))
    multiplier = float(saving[descending[whole]]) if whole < len(descending) else 0.0
    return multiplier * budget + float((most * np.maximum(saving - multiplier, 0.0)).sum())


def _conserved(program: FreezeProgram, optimum: Optimum) -> tuple[Floats, Floats, Floats]:
    """A flow through actions, edges and loops that conserves and follows the dual values.

    One unit is sent back from the batch's end. If steps overlap, it is one unit over all loops instead. Flow that is
    sent back from one loop's rank arrives, in shares, at the loops of all ranks. The stationary distribution of these
    shares is the flow of the loops.
    """
    dag, loops, dual = program.dag, program.dag.loops, optimum.flow
    durations = program.upper - optimum.ratios * program.ranges
    finish = dag.earliest_starts(durations) + durations
    arrival = finish[dag.edges.sources] + dag.edges.delay
    if not program.overlap:
        last = program.closing.sources
        nodes = np.zeros((len(dag.actions), 1))
        nodes[last, 0] = _shares(dual.ends[last], finish[last])
        shares = [_shares(dual.edges[of], arrival[of]) for of in _incoming(dag)]
        through, edges = _sent_back(dag, nodes, shares)
        return through[:, 0], edges[:, 0], np.zeros(0)
    again = finish[loops.sources] + loops.delay - dag.span(durations)
    number = {target: loop for loop, target in enumerate(loops.targets.tolist())}
    shares, kept = [], np.zeros(len(loops.sources))
    for position, of in enumerate(_incoming(dag)):
        loop = number.get(position)
        if loop is None:
            shares.append(_shares(dual.edges[of], arrival[of]))
            continue
        weights = np.append(dual.edges[of], dual.ends[loops.sources[loop]])
        together = _shares(weights, np.append(arrival[of], again[loop]))
        shares.append(together[:-1])
        kept[loop] = together[-1]
    nodes = np.zeros((len(dag.actions), len(loops.sources)))
    nodes[loops.sources, np.arange(len(loops.sources))] = 1.0
    through, edges = _sent_back(dag, nodes, shares)
    arrives = through[loops.targets] * kept[:, None]
    balance = np.vstack([arrives - np.eye(len(arrives)), np.ones(len(arrives))])
    flow = np.linalg.lstsq(balance, np.append(np.zeros(len(arrives)), 1.0), rcond=None)[0]
    flow = np.maximum(flow, 0.0)
    return through @ flow, edges @ flow, flow


def _incoming(dag: PipelineDag) -> list[slice]:
    """The edges that lead to each action."""
    first = np.searchsorted(dag.edges.targets, np.arange(len(dag.actions) + 1)).tolist()
    return [slice(start, stop) for start, stop in pairwise(first)]


def _sent_back(dag: PipelineDag, nodes: Floats, shares: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Send what starts at ``nodes`` back over each action's incoming edges, in ``shares``.

    ``nodes`` has shape (actions, flows). Returns the flows through actions and edges.
    """
    edges = np.zeros((len(dag.edges.sources), nodes.shape[1]))
    sources = dag.edges.sources.tolist()
    for position, incoming in reversed(list(enumerate(_incoming(dag)))):
        if incoming.stop > incoming.start and nodes[position].any():
            edges[incoming] = np.outer(shares[position], nodes[position])
            for edge in range(incoming.start, incoming.stop):
                nodes[sources[edge]] += edges[edge]
    return nodes, edges


def _shares(weights: Floats, arrivals: Floats) -> Floats:
    """Shares in proportion to ``weights``; all to the latest arrival where none is positive."""
    positive = np.where(np.isfinite(weights), np.maximum(weights, 0.0), 0.0)
    total = float(positive.sum())
    if total > 0.0:
        return positive / total
    shares = np.zeros_like(positive)
    if len(shares):
        shares[int(np.argmax(arrivals))] = 1.0
    return shares
