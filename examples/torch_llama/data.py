"""Windows of text as tokens: bytes, or what a checkpoint's own tokenizer makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

BYTES = 256


def tokenizer_in(folder: Path | None) -> Any:
    """The tokenizer that lies beside a checkpoint; None if there is none."""
    if folder is None or not any(folder.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encode(text: bytes, tokenizer: Any = None) -> Tensor:
    if tokenizer is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    decoded = text.decode(errors="ignore")  # the text may be cut inside a character
    return torch.tensor(tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Batches:
    """Batches of windows at random places of a text, the same on every rank and after a restart."""

    tokens: Tensor
    context: int
    windows: int  # of a batch
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.context:
            raise ValueError(f"a text of {len(self.tokens)} tokens is too short for a context of {self.context}")

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one batch: a pure function of its number and the seed."""
        generator = torch.Generator().manual_seed(2**32 * self.seed + number)
        starts = torch.randint(len(self.tokens) - self.context, (self.windows, 1), generator=generator)
        window = self.tokens[starts + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]
