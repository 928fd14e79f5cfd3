"""A proven limit of a plan's distance from the optimum."""

from __future__ import annotations

import numpy as np

from tf_adapters.planner.program import Floats, FreezeProgram, Optimum

__all__ = ["lower_bound", "optimality_gap"]


def optimality_gap(program: FreezeProgram, optimum: Optimum, target: float = 0.0) -> float:
    """The share of the makespan that no freeze ratios within the budgets can improve by; an end by ``target`` is 0."""
    planned = program.end(optimum.ratios)
    bound = max(lower_bound(program, optimum), target)
    return max(0.0, (planned - bound) / planned) if planned > 0.0 else 0.0


def lower_bound(program: FreezeProgram, optimum: Optimum) -> float:
    """A makespan that no freeze ratios within the budgets can beat, in the program's unit.

    One unit of flow from the batch's start to its end is a weighted mean of paths, so the batch takes at
    least the flow's length: sum of flow * (upper + delay) less what freezing can save on it. A stage saves
    at most u * budget + sum of max(0, range * throughflow - u) for every u >= 0. The flow follows the
    solver's dual values but is made to conserve exactly, so the bound holds however rough they are. No action freezes
    more than its ``most``, so what it saves counts in that proportion.
    """
    through, over_edges = _throughflow(program, optimum)
    length = float(through @ program.upper + over_edges @ program.dag.edges.delay)
    saving = through * program.ranges
    most_saved = sum(
        _most_saved(saving[p], program.most[p], program.budgets[stage]) for stage, p in program.stages.items()
    )
    return max(length - most_saved, program.end(program.most), 0.0)


def _most_saved(saving: Floats, most: Floats, budget: float) -> float:
    descending = np.argsort(-saving, kind="stable")
    whole = int(np.searchsorted(np.cumsum(most[descending]), budget, side="right"))
    multiplier = float(saving[descending[whole]]) if whole < len(descending) else 0.0
    return multiplier * budget + float((most * np.maximum(saving - multiplier, 0.0)).sum())


def _throughflow(program: FreezeProgram, optimum: Optimum) -> tuple[Floats, Floats]:
    """Send one unit back from the batch's end, over each action's incoming edges as the dual values say.

    Returns the flow through each action and each edge.
    """
    dag = program.dag
    durations = program.upper - optimum.ratios * program.ranges
    finish = dag.earliest_starts(durations) + durations
    arrival = finish[dag.edges.sources] + dag.edges.delay
    last = np.setdiff1d(np.arange(len(dag.actions)), dag.edges.sources)
    nodes = np.zeros(len(dag.actions))
    nodes[last] = _shares(optimum.flow.ends[last], finish[last])
    flow = np.zeros(len(arrival))
    first = np.searchsorted(dag.edges.targets, np.arange(len(dag.actions) + 1))
    for position in range(len(dag.actions) - 1, -1, -1):
        incoming = slice(first[position], first[position + 1])
        if nodes[position] > 0.0 and incoming.stop > incoming.start:
            flow[incoming] = nodes[position] * _shares(optimum.flow.edges[incoming], arrival[incoming])
            np.add.at(nodes, dag.edges.sources[incoming], flow[incoming])
    return nodes, flow


def _shares(weights: Floats, arrivals: Floats) -> Floats:
    """Shares in proportion to ``weights``; all to the latest arrival where none is positive."""
    positive = np.where(np.isfinite(weights), np.maximum(weights, 0.0), 0.0)
    total = float(positive.sum())
    if total > 0.0:
        return positive / total
    shares = np.zeros_like(positive)
    shares[int(np.argmax(arrivals))] = 1.0
    return shares
