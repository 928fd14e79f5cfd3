"""When Megatron's data parallelism reduces its buckets, as a rank of the tests sees it."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_ranks import Case, start, train_step


def reductions(case: Case) -> list[list[list[str]]]:
    """Of each step and each reduction of a bucket that begins: its gradients as they became ready.

    Each is "frozen", "trained" in a backward, or "waited" until it was computed after it.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from tf_adapters.megatron.ddp import FrozenGradients

    chunks, optimizer, adapter = start(case)
    steps: list[list[list[str]]] = []
    ready: dict[int, list[str]] = {}
    kinds = ["trained"]
    register, begin = Group.register_grad_ready, Group.start_grad_sync

    def registering(group: Any, *args: Any) -> None:
        if group.is_last_microbatch:
            ready.setdefault(id(group), []).append(kinds[-1])
        register(group, *args)

    def beginning(group: Any, *args: Any, **kwargs: Any) -> None:
        steps[-1].append(ready.pop(id(group), []))
        begin(group, *args, **kwargs)

    def named(kind: str, run: Any) -> Any:
        def running(*args: Any) -> None:
            kinds.append(kind)
            run(*args)
            kinds.pop()

        return running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "register_grad_ready", registering)
        patch.setattr(Group, "start_grad_sync", beginning)
        patch.setattr(FrozenGradients, "report", named("frozen", FrozenGradients.report))
        actions = adapter.controller._tapped_actions
        patch.setattr(actions, "_compute", named("waited", actions._compute))
        for number in range(case.steps):
            steps.append([])
            ready.clear()
            train_step(case, chunks, optimizer, number)
    adapter.detach()
    return steps
