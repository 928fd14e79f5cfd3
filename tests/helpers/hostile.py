"""Ordinary code of users that is hostile to weight gradients which are computed later.

A deferred weight gradient is the product of a layer's input and its output's gradient. A situation changes one of the
two before the product is computed, needs the product in the backward, or asks autograd for more than the product. Each
``Situation`` says what its blocks compute, which hooks they have, what the loss is, and in which step this begins.
``hostile_situations.SITUATIONS`` has all of them. Every host runs its own pipeline with the blocks in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from rank_pools import seed
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 8
Tensor = torch.Tensor
REFUSALS = ("ConfigError: ", "UnsupportedError: ")


class Verdict(Enum):
    """What must be true of a run that is compared with the host alone."""

    SAME = "all bits are the host's"
    LEFT = "all bits are the host's, and a line names the layer that is left to the host"
    LOUD = "a line names the step in which a bit is first another one"


class Situation:
    """Two linear layers, one after the other, and nothing hostile.

    One object is one rank's part of one run. A host calls ``block`` for each block, ``prepare`` before it attaches, and
    ``begin`` before each batch. It passes its loss through ``loss``, and calls ``end`` after each update.

    Args:
        rows: the tokens of a microbatch.
        layer: makes a linear layer of ``WIDTH`` inputs and outputs.
    """

    verdict = Verdict.SAME
    left = "b.weight"
    """The end of the name of a weight that is left to the host, for ``Verdict.LEFT``."""

    begins = 0
    """The first step in which the situation is hostile."""

    shape: tuple[int, ...] = (1, 3)
    """The shape of a microbatch without its features, for hosts where it can be chosen."""

    batches = 1
    """Batches of each update."""

    def __init__(self, rows: int = 3, layer: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        self.rows, self.layer = rows, layer
        self.blocks: list[Block] = []
        self.step = self.batch = 0
        self.around = ExitStack()  # what is replaced until the run ends

    @property
    def hostile(self) -> bool:
        """Whether it happens in this batch."""
        return self.step >= self.begins

    def block(self) -> Block:
        """Return a new block. Its values are a function of how many there were before."""
        self.blocks.append(Block(self, len(self.blocks)))
        return self.blocks[-1]

    def build(self, block: Block) -> None:
        """Give a block more than its two layers."""

    def prepare(self) -> None:
        """Register hooks, before anything is attached."""

    def begin(self, step: int, batch: int = 0) -> None:
        """A batch begins. Steps and batches count from 0."""
        self.step, self.batch = step, batch

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return x + block.through_b(torch.tanh(block.through_a(x)))

    def loss(self, loss: Tensor, output: Tensor) -> Tensor:
        """Return the loss of a microbatch, from the host's own and the model's output. On the last stage only."""
        return loss

    def end(self) -> None:
        """The optimizer has updated the weights."""


class Block(nn.Module):
    """Two linear layers. The situation says what is computed with them: ``[..., WIDTH]`` to the same shape."""

    def __init__(self, situation: Situation, number: int) -> None:
        super().__init__()
        seed(100 + number)
        self.a, self.b = situation.layer(), situation.layer()
        self.situation = situation
        situation.build(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.situation.forward(self, x)

    def through_a(self, x: Tensor) -> Tensor:
        return _output(self.a(x))

    def through_b(self, x: Tensor) -> Tensor:
        return _output(self.b(x))


def _output(returned: Any) -> Tensor:
    """Return the output. Megatron's layers return a pair of it and a bias."""
    return returned[0] if isinstance(returned, tuple) else returned  # type: ignore[no-any-return]


# --- what a run is compared by ---------------------------------------------------------------------------------------


def copies(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a step's tensors, of a DTensor this rank's part; None stays."""
    found = {}
    for name, tensor in named.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found[name] = None if own is None else own.detach().clone()
    return found


def check(situation: Situation, ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Raise AssertionError if a run is not what the situation's verdict asks for.

    Each rank has ``steps``, what each update left by name; ``first``, the number that lines give to the first of them;
    ``said``, the lines that a user sees; and ``raised``, the error that ended the run.
    """
    wrong: list[tuple[int, str]] = []
    for number, (mine, theirs) in enumerate(zip(ours, alone, strict=True)):
        wrong += [(step, f"rank {number}, step {step}: {text}") for step, text in _differences(mine, theirs)]
    wrong.sort()
    first = [text for step, text in wrong if step == wrong[0][0]]
    said = [line for rank in ours for line in rank["said"]]
    raised = next((rank["raised"] for rank in ours if rank["raised"]), "")
    if situation.verdict is Verdict.LOUD and (wrong or raised):
        named = (
            any(_names_step(line, ours[0]["first"] - 1 + wrong[0][0]) for line in said)
            if wrong
            else any(error in raised for error in REFUSALS)
        )
        assert named, "; ".join([raised, *first])
        return
    assert not raised, raised
    assert not wrong, "; ".join(first)
    if situation.verdict is Verdict.LEFT:
        assert any(situation.left in line for line in said), f"no line names {situation.left}: {said}"


def _differences(ours: dict[str, Any], alone: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield what differs in any bit between two runs of one rank, with its step, counted from 1."""
    for step, (mine, theirs) in enumerate(zip(ours["steps"], alone["steps"], strict=not ours["raised"]), 1):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            apart = _apart(mine[name], value)
            if apart:
                yield step, f"{name} {apart}"


def _apart(mine: Any, theirs: Any) -> str:
    if mine is None or theirs is None:
        return "" if mine is theirs else "is None on one side only"
    if torch.equal(mine, theirs):
        return ""
    return f"is off by {float((mine - theirs).abs().max()):.1e} of {float(theirs.abs().max()):.1e}"


def _names_step(line: str, step: int) -> bool:
    return re.search(rf"\bstep {step}\b", line) is not None
