"""What DistributedDataParallel hears of frozen gradients: before the backward, in time to overlap, without zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import fork_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tf_adapters.torch_pipelining.replicas import reduce_gradients, reported_to_reducer

LAYERS, WIDTH = 6, 8
FROZEN = ("1.weight", "4.weight")


@pytest.mark.distributed
def test_buckets_are_reduced_in_the_midst_of_the_backward() -> None:
    """Each with its last gradient: a frozen one that is reported afterwards would hold back all that follow."""
    with fork_ranks(2) as pool:
        for events, expected, actual in pool.run(reduced, True):
            gradients = [index for index, event in enumerate(events) if event != "reduction"]
            assert events.count("reduction") > 2
            assert events.index("reduction") < gradients[-2]
            assert all(torch.allclose(actual[name], expected[name]) for name in expected)
            assert actual.keys() - expected.keys() == set(FROZEN)
            assert all(not actual[name].any() for name in FROZEN)
        assert pool.run(reduced, False)[0][0] == []  # nothing is waited for before the last backward


def reduced(last: bool) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients and reductions in their order; the gradients to be expected, and those that came."""
    torch.manual_seed(0)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # else the first bucket holds everything
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model = DistributedDataParallel(layers, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20, gradient_as_bucket_view=True)
    events: list[str] = []

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        events.append("reduction")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # torch compares them with types, and they are texts
    model.register_comm_hook(None, hook)
    inputs = torch.randn(3, WIDTH)
    model(inputs).sum().backward()  # only then it makes more buckets than one
    model.zero_grad()
    model(inputs)
    events.clear()
    with model.no_sync():
        for name in FROZEN:
            layers.get_parameter(name).requires_grad_(False)
        output = model(inputs).square().mean()
        parameters = dict(layers.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        expected = dict(
            zip(trained, torch.autograd.grad(output, list(trained.values()), retain_graph=True), strict=True)
        )
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    with reported_to_reducer(model, FROZEN, first=False, last=last):
        if last:
            model.reducer.prepare_for_backward([])
            output.backward()
        else:
            with model.no_sync():
                output.backward()
            events.clear()
    assert not any(parameters[name].requires_grad for name in FROZEN)
    return events, expected, {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.distributed
def test_gradients_are_reduced_at_the_end_as_in_the_last_backward() -> None:
    """The same buckets in the same order, through the same communication hook, with the same bits."""
    with fork_ranks(2) as pool:
        for host, ours in pool.run(reduced_at_the_end):
            assert len(host[0]) > 2
            assert ours[0] == host[0]
            assert all(torch.equal(ours[1][name], gradient) for name, gradient in host[1].items())


def reduced_at_the_end() -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Sizes of the reduced buckets, and the gradients: with torch's last backward, then with ``reduce_gradients``."""
    torch.manual_seed(0)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    layers = nn.Sequential(*[nn.Linear(WIDTH + i, WIDTH + i + 1, bias=False) for i in range(LAYERS)])
    model = DistributedDataParallel(layers, bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    buckets: list[int] = []

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    hook.__annotations__.clear()  # torch compares them with types, and they are texts
    model.register_comm_hook(None, hook)
    torch.manual_seed(dist.get_rank())
    microbatches = [torch.randn(3, WIDTH) for _ in range(3)]
    model(microbatches[0]).sum().backward()  # only then it makes more buckets than one
    found = []
    for own in (False, True):
        model.zero_grad()
        buckets.clear()
        with model.no_sync():
            outputs = [model(microbatch).square().mean() for microbatch in microbatches]
            for output in outputs if own else outputs[:-1]:
                output.backward()
        if own:
            reduce_gradients(model)
        else:
            model.reducer.prepare_for_backward([])
            outputs[-1].backward()
        found.append(([*buckets], {name: p.grad.clone() for name, p in layers.named_parameters()}))
    return found


def test_a_frozen_parameter_without_gradient_is_given_no_zeros() -> None:
    """Its hooks fire all the same; what a stage of one replica does costs no memory."""
    from tf_adapters.torch_pipelining import replicas

    fired: list[str] = []
    parameters = [nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(2)]
    parameters[1].grad = torch.full((4,), 3.0)
    accumulators = []
    for index, parameter in enumerate(parameters):
        parameter.requires_grad_(True)
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, index=index: fired.append(f"{index}"))
        accumulators.append(node)
        parameter.requires_grad_(False)
    replicas._fire_hooks(parameters)
    assert sorted(fired) == ["0", "1"]
    assert parameters[0].grad is None
    assert torch.equal(parameters[1].grad, torch.full((4,), 3.0))
    assert not any(parameter.requires_grad for parameter in parameters)
