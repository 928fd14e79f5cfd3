"""The freeze program in the interior point method's form, and its Newton systems.

A Newton step solves ``rows' W rows x = right``. W is diagonal and positive. A row is an edge of the DAG, a bound of a
piece of a ratio or a stage's budget.

- A ratio is the sum of its pieces, one for each straight part of its price. The pieces of a ratio differ in their
  bounds only, so they are eliminated by hand, like springs in series: their stiffness is one over the sum of the
  inverses.
- A ratio stands only in the edges that leave its action and in one budget. It is eliminated by hand, too.
- The remaining matrix is a weighted Laplacian of the DAG. It is as narrow as the pipeline: a row of its Cholesky factor
  has about two entries per stage, for any number of microbatches. Elimination of the ratios keeps it a Laplacian: an
  edge keeps a share of its weight, and two edges of one source couple their targets. All weights stay sums and
  products of positive numbers, so that tight edges lose no precision.
- The budgets are a border of that matrix, one dense row per stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu

from tf_adapters.planner.program import Corners, Floats, Flow, FreezeProgram

Indices = NDArray[np.int64]

_BY_RATIO: Corners = ((0.0, 0.0), (1.0, 1.0))

_REFINEMENTS = 2
_EXACT = 1e-12
"""A residual below this share of the right side needs no refinement."""


@dataclass(frozen=True, eq=False)
class _Network:
    """Edges of the DAG, and further edges for the span. The span has a node of its own, after those of all actions.

    If ranks meet, the span is the batch's end, and actions without a successor have an edge to its node. If steps
    overlap, the span is the period, and the further edges are the loops. A loop ends at its target's start plus the
    period. Its ``turns`` is therefore 1, and the ``turns`` of every other edge is 0.

    ``owner`` is the ratio of an edge's source. ``leverage`` is the time by which a ratio of 1 shortens the edge; it is
    0 where the source has no ratio. ``siblings`` are pairs of edges that leave the same source, if it has a ratio.
    ``grounded`` are nodes with a bound of their own.
    """

    sources: Indices
    targets: Indices
    turns: Floats
    delay: Floats
    owner: Indices
    leverage: Floats
    siblings: tuple[Indices, Indices]
    grounded: Indices

    @classmethod
    def of(cls, program: FreezeProgram, freezable: Indices, grounded: Indices) -> _Network:
        edges, closing = program.dag.edges, program.closing
        sources = np.concatenate([edges.sources, closing.sources])
        column = np.zeros(len(program.upper), dtype=np.int64)
        column[freezable] = np.arange(len(freezable))
        owner, leverage = column[sources], program.ranges[sources]
        shortened = np.flatnonzero(leverage > 0.0)
        ones = np.ones(len(shortened), dtype=np.int64)
        leaves = sparse.csr_array((ones, (shortened, owner[shortened])), (len(sources), len(freezable)))
        return cls(
            sources=sources,
            targets=np.concatenate([edges.targets, closing.targets]),
            turns=np.concatenate([np.zeros(len(edges.sources)), np.full(len(closing.sources), float(program.overlap))]),
            delay=np.concatenate([edges.delay, closing.delay]),
            owner=owner,
            leverage=leverage,
            siblings=sparse.triu(leaves @ leaves.T, 1).nonzero(),
            grounded=grounded,
        )


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The straight parts of all ratios' prices, in order of the ratios.

    ``owner`` is the ratio that a piece belongs to. ``width`` is the part of the ratio that the piece can add. ``slope``
    is the piece's price per unit of ratio. Slopes are scaled so that the largest ratio costs 1 per unit on average.
    """

    owner: Indices
    width: Floats
    slope: Floats

    @classmethod
    def of(cls, price: Corners, most: Floats) -> _Pieces:
        """The pieces of ratios up to ``most``, each above 0."""
        ratios, prices = np.array(price or _BY_RATIO).T
        slopes = ratios[-1] / (prices[-1] or 1.0) * np.diff(prices) / np.diff(ratios)
        widths = np.minimum(ratios[1:], most[:, None]) - np.minimum(ratios[:-1], most[:, None])
        owner, piece = np.nonzero(widths > 0.0)
        return cls(owner, widths[owner, piece], slopes[piece])

    @property
    def are_ratios(self) -> bool:
        """Return whether each ratio is one piece."""
        return len(self.owner) == 0 or len(self.owner) == self.owner[-1] + 1

    def sums(self, values: Floats) -> Floats:
        """By ratio, the sum of its pieces' values."""
        return values if self.are_ratios else np.asarray(np.bincount(self.owner, values), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class StandardForm:
    """A linear program's x where ``rows x - least = slack >= 0``: the start times, the span, the ratios' pieces.

    The rows come in this order: DAG edges, edges for the span, starts of actions without a predecessor, the longest
    span if there is a limit. Then come pieces at least 0, pieces at most their widths, and budgets.

    Attributes:
        freezable: the position of each ratio's action.
        members: shape (budgets, ratios); 1 where a ratio counts in a budget.
    """

    program: FreezeProgram
    rows: sparse.csr_array
    least: Floats
    freezable: Indices
    pieces: _Pieces
    members: sparse.csr_array
    budgets: Floats
    network: _Network
    pattern: _Pattern

    @classmethod
    def of(cls, program: FreezeProgram, longest: float | None = None) -> StandardForm:
        """The form of ``program``, with a span of at most ``longest``, if given."""
        dag, actions = program.dag, len(program.upper)
        freezable = np.flatnonzero(program.ranges * program.most > 0.0)
        pieces = _Pieces.of(program.price, program.most[freezable])
        first = np.setdiff1d(np.arange(actions), dag.edges.targets)
        limited = np.full(0 if longest is None else 1, actions)
        network = _Network.of(program, freezable, np.concatenate([first, limited]))
        node, own = (sparse.eye_array(size, format="csr") for size in (actions + 1, len(pieces.owner)))
        of_action = freezable[pieces.owner]
        saved = sparse.csr_array(
            (program.ranges[of_action], (of_action, np.arange(len(of_action)))), (actions, len(of_action))
        )
        every = np.arange(len(network.sources))
        span = sparse.csr_array((network.turns, (every, np.full(len(every), actions))), (len(every), actions + 1))
        members = sparse.csr_array(np.stack([np.isin(freezable, p) for p in program.stages.values()]), dtype=float)
        budgets = np.array([program.budgets[stage] for stage in program.stages])
        rows = sparse.block_array(
            [
                [node[network.targets] - node[network.sources] + span, saved[network.sources]],
                [sparse.vstack([node[first], -node[limited]]), None],
                [None, own],
                [None, -own],
                [None, -members[:, pieces.owner]],
            ],
            format="csr",
        )
        least = [
            program.upper[network.sources] + network.delay,
            np.zeros(len(first)),
            np.full(len(limited), 0.0 if longest is None else -longest),
            np.zeros(len(pieces.owner)),
            -pieces.width,
            -budgets,
        ]
        return cls(
            program=program,
            rows=rows,
            least=np.concatenate(least),
            freezable=freezable,
            pieces=pieces,
            members=members,
            budgets=budgets,
            network=network,
            pattern=_Pattern.of(network, actions + 1, members),
        )

    def inside(self) -> Floats:
        """An x with slack in every row: half of every budget used, every action a little late."""
        program = self.program
        half = (np.minimum(0.5, 0.5 * self.budgets / np.maximum(1.0, self.members.sum(axis=1)))) @ self.members
        half = np.minimum(half, 0.5 * program.most[self.freezable])
        durations = program.upper.copy()
        durations[self.freezable] -= half * program.ranges[self.freezable]
        late = 1.02 * durations + 0.01
        starts = program.dag.earliest_starts(late) + 0.01
        span = np.max(starts + late) + float(np.max(program.dag.loops.delay, initial=0.0))
        of_pieces = half[self.pieces.owner] * (self.pieces.width / program.most[self.freezable][self.pieces.owner])
        return np.concatenate([starts, [span], of_pieces])

    def cost(self, span: float, price: float) -> Floats:
        """The objective's gradient: ``span`` per unit of the span, ``price`` per unit of the largest ratio."""
        return np.concatenate([np.zeros_like(self.program.upper), [span], price * self.pieces.slope])

    def ratios(self, x: Floats) -> Floats:
        """Freeze ratios in the order of the DAG's actions."""
        ratios = np.zeros_like(self.program.upper)
        sums = self.pieces.sums(x[len(ratios) + 1 :])
        ratios[self.freezable] = np.clip(sums, 0.0, self.program.most[self.freezable])
        return ratios

    def flow(self, z: Floats) -> Flow:
        """Dual values of the precedence rows."""
        inner = len(self.program.dag.edges.sources)
        ends = np.zeros_like(self.program.upper)
        ends[self.network.sources[inner:]] = z[inner : len(self.network.sources)]
        return Flow(z[:inner], ends)


_Part = tuple[Indices, Indices, Indices, "Floats | float"]
"""Rows and columns of entries of a matrix, the number of the value that each one adds up, and its factor."""


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The bordered Laplacian of every Newton step: where its entries are, and which values add up to each.

    ``rank`` is a node's place in the order of elimination; the budgets come last.
    """

    rank: Indices
    indices: NDArray[np.int32]
    indptr: NDArray[np.int32]
    gather: sparse.csr_array

    @classmethod
    def of(cls, network: _Network, nodes: int, members: sparse.csr_array) -> _Pattern:
        first, second = network.siblings
        one = np.concatenate([network.targets, network.targets[first]])
        two = np.concatenate([network.sources, network.targets[second]])
        turns = np.concatenate([network.turns, network.turns[first] - network.turns[second]])
        rank = _elimination_order(one, two, nodes)
        again = np.flatnonzero(network.turns)
        if len(again):  # no edge ends at the period's node, but every loop couples it: it is eliminated last
            rank = np.where(rank > rank[-1], rank - 1, rank)
            rank[-1] = nodes - 1
        one, two, ground = rank[one], rank[two], rank[network.grounded]
        looped = np.flatnonzero(turns)
        period = np.full(len(looped), rank[nodes - 1])
        stages = np.arange(members.shape[0])
        border = nodes + (stages @ members).astype(np.int64)[network.owner]
        heads, tails = one[: len(border)], two[: len(border)]
        pairs, edges = np.arange(len(one)), len(one) + len(ground) + np.arange(len(border))
        corner = nodes + stages
        diagonal: list[_Part] = [
            (one, one, pairs, 1.0),
            (two, two, pairs, 1.0),
            (ground, ground, len(one) + np.arange(len(ground)), 1.0),
            (corner, corner, len(one) + len(ground) + len(border) + stages, -1.0),
            (period, period, looped, turns[looped] ** 2),
        ]
        below: list[_Part] = [
            (one, two, pairs, -1.0),
            (border, heads, edges, -1.0),
            (border, tails, edges, 1.0),
            (period, one[looped], looped, turns[looped]),
            (period, two[looped], looped, -turns[looped]),
            (border[again], period[: len(again)], edges[again], -1.0),
        ]
        above: list[_Part] = [(column, row, value, factor) for row, column, value, factor in below]
        parts = diagonal + below + above
        row, column, value = (np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3])
        sign = np.concatenate([factor * np.ones(len(rows)) for rows, _, _, factor in parts])
        size = nodes + len(stages)
        entries, entry = np.unique(column * size + row, return_inverse=True)
        indptr = np.searchsorted(entries, np.arange(size + 1) * size)
        return cls(
            rank=rank,
            indices=(entries % size).astype(np.int32),
            indptr=indptr.astype(np.int32),
            gather=sparse.csr_array((sign, (entry, value)), (len(entries), int(value.max()) + 1)),
        )

    def matrix(self, values: Floats) -> sparse.csc_array:
        size = len(self.indptr) - 1
        return sparse.csc_array((self.gather @ values, self.indices, self.indptr), (size, size))


def _elimination_order(one: Indices, two: Indices, nodes: int) -> Indices:
    """Each node's place in an order that keeps the factor of a Laplacian with edges ``one`` to ``two`` sparse."""
    degree = np.bincount(one, minlength=nodes) + np.bincount(two, minlength=nodes) + 1.0
    edges = sparse.csr_array((-np.ones(len(one)), (one, two)), (nodes, nodes))
    laplacian = (edges + edges.T + sparse.diags_array(degree)).tocsc()
    factor = splu(laplacian, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    return np.asarray(factor.perm_c, dtype=np.int64)


class Newton:
    """``rows' W rows``, factored. Raises RuntimeError when it is singular to working precision.

    ``weights`` are W's diagonal, by row.
    """

    def __init__(self, form: StandardForm, weights: Floats) -> None:
        self._form, self._weights = form, weights
        network, pieces, ratios = form.network, form.pieces, len(form.freezable)
        of_edges, of_grounds, low, high, of_budgets = np.split(
            weights, np.cumsum([len(network.sources), len(network.grounded), len(pieces.owner), len(pieces.owner)])
        )
        self._bounds = low + high
        bounds = self._bounds if pieces.are_ratios else 1.0 / pieces.sums(1.0 / self._bounds)
        self._shares = bounds[pieces.owner] / self._bounds
        self._stiffness = bounds
        self._pull = network.leverage * of_edges
        self._diagonal = np.bincount(network.owner, network.leverage * self._pull, minlength=ratios) + bounds
        share = np.where(network.leverage > 0.0, (bounds / self._diagonal)[network.owner], 1.0)
        first, second = network.siblings
        values = [
            share * of_edges,
            self._pull[first] * self._pull[second] / self._diagonal[network.owner[first]],
            of_grounds,
            self._pull / self._diagonal[network.owner],
            1.0 / of_budgets + form.members @ (1.0 / self._diagonal),
        ]
        self._factor = splu(
            form.pattern.matrix(np.concatenate(values)),
            permc_spec="NATURAL",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )

    def solve(self, right: Floats) -> Floats:
        """x with ``rows' W rows x = right``, refined: near the optimum the matrix is badly conditioned."""
        rows = self._form.rows
        x = self._once(right)
        for _ in range(_REFINEMENTS):
            residual = right - rows.T @ (self._weights * (rows @ x))
            if np.abs(residual).max() <= _EXACT * np.abs(right).max():
                break
            x = x + self._once(residual)
        return x

    def _once(self, right: Floats) -> Floats:
        times, pulls = np.split(right, [len(self._form.pattern.rank)])
        pieces = self._form.pieces
        if pieces.are_ratios:
            return np.concatenate(self._reduced(times, pulls))
        alone = pulls / self._bounds  # where each piece would stand without the edges and the budget
        together = pieces.sums(alone)
        times, ratios = self._reduced(times, self._stiffness * together)
        return np.concatenate([times, alone + self._shares * (ratios - together)[pieces.owner]])

    def _reduced(self, times: Floats, ratios: Floats) -> tuple[Floats, Floats]:
        """The system of start times and ratios, without pieces."""
        network, rank, members = self._form.network, self._form.pattern.rank, self._form.members
        free = ratios / self._diagonal
        pulled = self._pull * free[network.owner]
        times = (
            times - np.bincount(network.targets, pulled, len(rank)) + np.bincount(network.sources, pulled, len(rank))
        )
        times[-1] -= network.turns @ pulled
        bordered = np.empty(len(rank) + len(self._form.budgets))
        bordered[rank], bordered[len(rank) :] = times, -(members @ free)
        answer = self._factor.solve(bordered)
        times, prices = answer[rank], answer[len(rank) :]
        drawn = self._pull * (times[network.targets] - times[network.sources] + network.turns * times[-1])
        drawn = np.bincount(network.owner, drawn, minlength=len(ratios)) + prices @ members
        return times, (ratios - drawn) / self._diagonal
