"""What tests of updates before the norm is known share on every host."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tf_adapters.hosts import post_validation
from tf_adapters.report import Report
from tf_adapters.testing import RankPool
from tf_adapters.testing.ranks import RanksFailed

ALWAYS = 1e-2
"""A norm that all gradients exceed."""

HALF = "half of the steps"
"""Name of a limit that about half of a training's gradients exceed."""


@contextmanager
def pausing(pauses: bool) -> Iterator[None]:
    """Inside, updates never wait for the norm unless it ``pauses``, however many are made again."""
    with pytest.MonkeyPatch.context() as patch:
        if not pauses:
            patch.setattr(post_validation, "_LOOKED_AT", 10**9)
        yield


def shifted(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Tokens of data that draws random numbers while it is loaded."""
    return (tokens + int(torch.randint(3, ())) + random.randrange(3)) % vocabulary


def assert_counted(ours: Sequence[dict[str, Any]], steps: int, limit: str, folder: Path) -> None:
    """All updates but the first did not wait, and as many as the ``limit`` says were made again, on every rank."""
    updates, made_again = ours[0]["counts"]
    assert [rank["counts"] for rank in ours] == [(updates, made_again)] * len(ours)
    assert updates == steps - 1
    assert ours[0]["late"] == [False, *[True] * updates]
    if limit == HALF:
        assert made_again == pytest.approx(updates / 2, abs=8)
    else:
        assert made_again == (updates if limit == "always" else 0)
    report = Report.read(folder / "timely_freeze" / "report.json")
    assert f"{made_again} of them were made again" in report.note[-1]


def train_until_killed(train_step: Callable[[int], object], steps: int, killed_rank: int) -> None:
    """One rank ends after its update, before anybody knows whether it has to be made again; others end by an error."""
    try:
        for step in range(steps):
            train_step(step)
            if step == 8 and torch.distributed.get_rank() == killed_rank:
                os._exit(7)
    except RuntimeError:
        os._exit(1)


def assert_nobody_waits(ranks: RankPool, job: Callable[..., None], case: Any, killed_rank: int) -> None:
    """Four ranks run the ``job``, which kills one of them. Each of the others ends by an error."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(job, case, killed_rank)
    codes = [7 if rank == killed_rank else 1 for rank in range(4)]
    assert str(caught.value) == "\n".join(
        f"rank {rank}:\ndied with exit code {code}" for rank, code in enumerate(codes)
    )
