"""What freezing by rows saves of a backward, against freezing whole tensors: a stage of two linear layers.

Every round runs each freeze ratio once under each granularity, in random order, in one process, with masks as a run
draws them. What a ratio saves of the median backward is compared with its proportional part: the ratio times what
freezing everything saves. Gradients are added to those of earlier microbatches, as in all but a step's first. ::

    python benchmarks/rows.py                           # about a minute on one core, which nothing else should use
    python benchmarks/rows.py --tokens 2048 --shapes 2048x2048,2048x8192
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measuring import machine

from tf_adapters.masking.parameters import ParameterMask
from tf_adapters.masking.rows import RowMask, plain_layer, row_layers, with_rows
from tf_adapters.selection.masks import Mask, StageMasks
from tf_adapters.testing.plans import tensor_units

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
GRANULARITIES = ("tensor", "row")
RESULT = ROOT / "benchmarks" / "results" / "rows.json"


class Stage:
    """Linear layers one after the other, whose input needs a gradient, as behind another stage."""

    def __init__(self, shapes: list[tuple[int, int]], tokens: int) -> None:
        layers = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in shapes]
        self.module = nn.Sequential(*layers)
        self.inputs = torch.randn(tokens, shapes[0][0], requires_grad=True)
        self.gradient = torch.randn(tokens, shapes[-1][1])
        parameters = dict(self.module.named_parameters())
        units = {0: tensor_units(parameters)}
        self._whole, self._rows = ParameterMask(parameters), RowMask(row_layers(self.module, plain_layer))
        self._masks = {
            "tensor": StageMasks(units, seed=0),
            "row": StageMasks(with_rows(units, {0: self._rows}), seed=0),
        }

    def draw(self, granularity: str, number: int, ratio: float) -> Mask:
        return self._masks[granularity].draw(number, 0, 0, ratio)

    def run(self, mask: Mask) -> tuple[float, float]:
        """Milliseconds of the forward and of the backward of one microbatch."""
        self.inputs.grad = None
        with self._whole.frozen(mask.names), self._rows.frozen(mask.rows):
            began = time.perf_counter()
            output = self.module(self.inputs)
            between = time.perf_counter()
            output.backward(self.gradient)
            ended = time.perf_counter()
        return (between - began) * 1e3, (ended - between) * 1e3


@dataclass(frozen=True)
class Cell:
    """One granularity at one ratio: medians over rounds, and from the 10th to the 90th percentile.

    ``saved_over_proportional`` is None where nothing, or everything, is frozen; its range is of rounds drawn again.
    """

    granularity: str
    ratio: float
    frozen_share: tuple[float, float]
    forward_ms: float
    backward_ms: float
    backward_ms_range: tuple[float, float]
    saved_over_proportional: float | None
    saved_over_proportional_range: tuple[float, float] | None


Case = tuple[str, float]
Times = dict[Case, np.ndarray]
"""Milliseconds of backwards, by granularity and ratio: one for each round."""


def measure(stage: Stage, rounds: int) -> list[Cell]:
    rng = np.random.default_rng(0)
    cases: list[Case] = [(granularity, ratio) for granularity in GRANULARITIES for ratio in RATIOS]
    forward, backward = ({case: np.zeros(rounds) for case in cases} for _ in range(2))
    shares: dict[Case, list[float]] = {case: [] for case in cases}
    warm_up(stage)
    for number in range(rounds):
        for place in rng.permutation(len(cases)):
            case = cases[place]
            mask = stage.draw(case[0], number, case[1])
            forward[case][number], backward[case][number] = stage.run(mask)
            shares[case].append(mask.share)
    return [cell(case, forward[case], backward, shares[case]) for case in cases]


def warm_up(stage: Stage) -> None:
    """Allocate the gradients, load the kernels."""
    for number in range(3):
        for granularity in GRANULARITIES:
            stage.run(stage.draw(granularity, number, 0.5))
    stage.run(stage.draw("row", 0, 0.0))


def cell(case: Case, forward: np.ndarray, backward: Times, shares: list[float]) -> Cell:
    granularity, ratio = case
    part = 0.0 < ratio < 1.0
    return Cell(
        granularity=granularity,
        ratio=ratio,
        frozen_share=(min(shares), max(shares)),
        forward_ms=float(np.median(forward)),
        backward_ms=float(np.median(backward[case])),
        backward_ms_range=middle(backward[case]),
        saved_over_proportional=saved_over_proportional(case, backward) if part else None,
        saved_over_proportional_range=middle(again(case, backward)) if part else None,
    )


def saved_over_proportional(case: Case, backward: Times) -> float:
    """What the ratio saved of what is its part of all that can be saved."""
    granularity, ratio = case
    nothing, some, everything = (float(np.median(backward[granularity, r])) for r in (0.0, ratio, 1.0))
    return (nothing - some) / (ratio * (nothing - everything))


def again(case: Case, backward: Times) -> np.ndarray:
    """The same from as many rounds, drawn from those that ran."""
    rng = np.random.default_rng(1)
    picks = (rng.integers(len(backward[case]), size=len(backward[case])) for _ in range(500))
    return np.array([saved_over_proportional(case, {c: ms[pick] for c, ms in backward.items()}) for pick in picks])


def middle(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, (0.1, 0.9)).tolist()
    return low, high


def lines(cells: list[Cell]) -> Iterator[str]:
    yield f"{'frozen as':<10}{'AFR':>6}{'share frozen':>16}{'forward':>11}{'backward ms':>26}{'saved / its part':>24}"
    for c in cells:
        share = f"{c.frozen_share[0]:.3f}..{c.frozen_share[1]:.3f}"
        backward = f"{c.backward_ms:.2f} ({c.backward_ms_range[0]:.2f}..{c.backward_ms_range[1]:.2f})"
        saved = "-"
        if c.saved_over_proportional_range is not None:
            low, high = c.saved_over_proportional_range
            saved = f"{c.saved_over_proportional:.2f} ({low:.2f}..{high:.2f})"
        yield f"{c.granularity:<10}{c.ratio:>6.2f}{share:>16}{c.forward_ms:>11.2f}{backward:>26}{saved:>24}"


def shapes_of(text: str) -> list[tuple[int, int]]:
    """Inputs and outputs of each layer, from text such as 1024x1024,1024x4096."""
    shapes = [(int(inputs), int(outputs)) for inputs, outputs in (layer.split("x") for layer in text.split(","))]
    if any(before[1] != after[0] for before, after in pairwise(shapes)):
        raise argparse.ArgumentTypeError(f"{text}: a layer's inputs must be the outputs of the one before it")
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    parser.add_argument("--shapes", type=shapes_of, default="1024x1024,1024x4096")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    cells = measure(Stage(options.shapes, options.tokens), options.rounds)
    print(*lines(cells), sep="\n")
    record = {"machine": machine(), "options": vars(options), "cells": [asdict(c) for c in cells]}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
