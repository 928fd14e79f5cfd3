"""The tasks of the language model study: which network, which text, for how long."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.language_model.network import Shape
from benchmarks.shared.files import use_example

use_example()

from text import ByteDataset, load_text, split  # noqa: E402

Rows = tuple[torch.Tensor, torch.Tensor]
"""Windows of bytes ``[rows, context]``, and the bytes that follow."""


@dataclass(frozen=True)
class Task:
    """A task: its network, its text and the length of its training.

    Attributes:
        steps: of the host alone, in the time that all trainings have.
        rows: windows of a microbatch.
        text: of ``examples/text.py``.
        learning_rate: of the host alone.
        most: bytes of training text at most; 0 takes all of it.
        once: no byte is trained on twice, else windows begin at random places.
        pretrained: start from what this task ends with when nothing is frozen, seed 0.
        evaluations, held_out: how often the loss is read, and of how many held-out windows.
    """

    shape: Shape
    steps: int
    text: str
    rows: int = 2
    learning_rate: float = 6e-3
    most: int = 0
    once: bool = False
    pretrained: str = ""
    evaluations: int = 6
    held_out: int = 256

    def data(self, windows: int, seed: int) -> ByteDataset:
        """Return the data of a training of ``windows`` windows."""
        text = split(load_text(self.text))[0]
        data = ByteDataset(text[: self.most or None], self.shape.context, windows, seed)
        if self.once:
            places = torch.randperm(len(text) // self.shape.context - 1, generator=torch.Generator().manual_seed(seed))
            if len(places) < windows:
                raise ValueError(f"{self.text} has no {windows} windows that do not overlap")
            data.starts = (places[:windows] * self.shape.context).tolist()
        return data

    def test(self) -> Rows:
        """Return the held-out windows for the loss."""
        held_out = split(load_text(self.text))[1]
        return rows_of(ByteDataset(held_out, self.shape.context, self.held_out, seed=1), range(self.held_out))


_SMALL = Shape(layers=4, width=48, context=32)
TASKS = {
    "from scratch": Task(_SMALL, steps=150, text="topics"),
    "text seen once": Task(_SMALL, steps=150, text="kjv", once=True),
    "fine-tuned": Task(
        _SMALL, steps=80, text="topics", learning_rate=2e-3, most=20_000, pretrained="text to pretrain on"
    ),
    "12 layers, text seen once": Task(
        Shape(layers=12, width=128, context=128), steps=240, text="kjv", learning_rate=3e-3, once=True
    ),
}
PRETRAINING = {"text to pretrain on": Task(_SMALL, steps=200, text="kjv", once=True)}


def rows_of(data: ByteDataset, indices: range) -> Rows:
    inputs, labels = zip(*(data[index] for index in indices), strict=True)
    return torch.stack(inputs), torch.stack(labels)
