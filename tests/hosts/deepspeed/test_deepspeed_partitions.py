"""What a whole step froze of a flat partition: passed over by the optimizer's step, and nothing of it is copied."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.optimizer_step import Allocated
from tf_adapters.deepspeed import partitions
from tf_adapters.deepspeed.optimizers import HeldParameters

SIZES = (3_000, 5_000, 1, 4_000, 7_000)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1, momentum=0.9),
}


class Unknown(torch.optim.AdamW):
    """An optimizer that we know nothing of: what it does is put back."""


@pytest.fixture(autouse=True)
def one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "dist", SimpleNamespace(get_rank=lambda group: 0))


class Partition:
    """An engine with one flat partition, as ZeRO stage 1 makes it."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.flat = torch.nn.Parameter(torch.randn(sum(SIZES)))
        self.inner = make([self.flat])
        weights = torch.zeros(sum(SIZES), dtype=torch.bfloat16)
        self.parameters = [torch.nn.Parameter(part) for part in weights.split(SIZES)]
        outer = SimpleNamespace(
            single_partition_of_fp32_groups=[self.flat],
            bit16_groups=[self.parameters],
            bit16_groups_flat=[weights],
            parallel_partitioned_bit16_groups=[[weights]],
            real_dp_process_group=[None],
        )
        self.holder = HeldParameters(SimpleNamespace(optimizer=outer, basic_optimizer=self.inner))
        self.inner.register_step_pre_hook(self.holder.before_step)
        self.inner.register_step_post_hook(self.holder.after_step)

    def step(self, number: int, held: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(number)
        self.flat.grad = torch.randn(sum(SIZES), generator=generator)
        self.holder.held = tuple(self.parameters[index] for index in held)
        self.inner.step()
        self.holder.held = ()

    def values(self) -> dict[str, Any]:
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in self.inner.state[self.flat].items()}
        return {"value": self.flat.detach().clone(), **state}


def parts(values: dict[str, Any], index: int) -> dict[str, torch.Tensor]:
    """Of each value that has an element for each of the partition's, the part of one parameter."""
    at = sum(SIZES[:index])
    flat = {k: v for k, v in values.items() if torch.is_tensor(v) and v.numel() == sum(SIZES)}
    return {name: value.narrow(0, at, SIZES[index]) for name, value in flat.items()}


@pytest.mark.parametrize("held", [(), (0,), (1, 2), (0, 4), (0, 2, 3), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "unknown"])
def test_what_is_held_stays_and_the_rest_moves_as_it_would(name: str, held: tuple[int, ...]) -> None:
    make = OPTIMIZERS.get(name, lambda p: Unknown(p, lr=0.1, weight_decay=0.1))
    ours, plain = Partition(make), Partition(make)
    for partition in (ours, plain):
        partition.step(0)
    before, groups = ours.values(), [dict(group) for group in ours.inner.param_groups]
    ours.step(1, held)
    plain.step(1)
    now, expected = ours.values(), plain.values()
    for index in range(len(SIZES)):
        mine, theirs = parts(now, index), parts(before if index in held else expected, index)
        for kind, value in mine.items():
            torch.testing.assert_close(value, theirs[kind], rtol=0.0 if index in held else 1e-6, atol=0.0)
    if "step" in expected:
        assert now["step"] == expected["step"]
    assert list(ours.inner.state) == [ours.flat]
    assert all(g["params"] == b["params"] for g, b in zip(ours.inner.param_groups, groups, strict=True))
    ours.step(2)
    assert not torch.equal(ours.values()["value"], now["value"])


@pytest.mark.parametrize("held", [(1, 2), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_holding_copies_less_than_a_hundredth_of_the_partition(name: str, held: tuple[int, ...]) -> None:
    partition = Partition(OPTIMIZERS[name])
    partition.step(0)
    partition.holder.held = tuple(partition.parameters[index] for index in held)
    with Allocated() as allocated:
        partition.holder.before_step()
        partition.holder.after_step()
    assert allocated.bytes <= 0.01 * partition.flat.numel() * partition.flat.element_size()


def test_a_step_that_was_cut_off_leaves_the_optimizer_whole() -> None:
    partition = Partition(OPTIMIZERS["AdamW"])
    partition.step(0)
    partition.holder.held = tuple(partition.parameters[:1])
    partition.holder.before_step()  # and then the step fails
    partition.step(1, held=(1,))
    assert [group["params"] for group in partition.inner.param_groups] == [[partition.flat]]
    assert list(partition.inner.state) == [partition.flat]
