"""A proof of how far from the optimum a plan can be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tf_adapters.planner.program import Floats, FreezeProblem, Optimum

__all__ = ["lower_bound"]


def lower_bound(problem: FreezeProblem, optimum: Optimum) -> float:
    """A makespan that no freeze ratios within the budgets can beat, in the problem's unit.

    One unit of flow from the batch's start to its end is a weighted mean of paths, so the batch takes at
    least the flow's length: sum of flow * (upper + delay) less what freezing can save on it. A stage saves
    at most u * budget + sum of max(0, range * throughflow - u) for every u >= 0. The flow follows GLOP's
    dual values but is made to conserve exactly, so the bound holds however rough they are.
    """
    edges, through = problem.dag.edges, _throughflow(problem, optimum)
    length = float(through.nodes @ problem.upper + through.edges @ edges.delay)
    saving = through.nodes * problem.ranges
    most_saved = sum(_most_saved(saving[p], problem.budgets[stage]) for stage, p in problem.stages.items())
    return max(length - most_saved, problem.end(np.ones_like(problem.upper)), 0.0)


def _most_saved(saving: Floats, budget: float) -> float:
    descending = np.sort(saving)[::-1]
    whole = int(budget)
    multiplier = float(descending[whole]) if whole < len(descending) else 0.0
    return multiplier * budget + float(np.maximum(saving - multiplier, 0.0).sum())


class _Throughflow(NamedTuple):
    nodes: Floats
    edges: Floats


def _throughflow(problem: FreezeProblem, optimum: Optimum) -> _Throughflow:
    """Send one unit back from the batch's end, over each action's incoming edges as the dual values say."""
    dag = problem.dag
    durations = problem.upper - optimum.ratios * problem.ranges
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
    return _Throughflow(nodes, flow)


def _shares(weights: Floats, arrivals: Floats) -> Floats:
    """Shares in proportion to ``weights``; all to the latest arrival where none is positive."""
    positive = np.where(np.isfinite(weights), np.maximum(weights, 0.0), 0.0)
    total = float(positive.sum())
    if total > 0.0:
        return positive / total
    shares = np.zeros_like(positive)
    shares[int(np.argmax(arrivals))] = 1.0
    return shares
