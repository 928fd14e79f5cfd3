"""Updates before the norm of all gradients is known, which are made again if clipping was due.

Clipping by the global norm makes all ranks of a pipeline meet after each batch. Here a rank updates at once, without
clipping, and keeps copies. The norm arrives while the next batch's first forwards run. Before its first backward each
rank looks at it. If clipping was due, the rank makes the update again with clipped gradients, and its forwards of this
batch run again. No rank has computed a gradient before it has looked, so the trained weights are those of an update
after the norm. Idea: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from tf_adapters.hosts.late import LateNorms, LateTensor
from tf_adapters.hosts.updates import UpdateCopies

__all__ = ["PostValidation", "Redo", "own_norm"]

_LOOKED_AT = 20
_MOST_MADE_AGAIN = 0.2
"""Largest share of the last ``_LOOKED_AT`` updates that were made again; above it updates wait for the norm."""

_PAUSE = 50
"""Updates that then wait."""

_BACKWARDS = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)


class PostValidation:
    """The newest update of this rank, until it is known to be right. Made on all ranks of ``group`` at the same point.

    Every rank finds the same norm, so all of them decide alike. ``warn`` gets a line at the begin of a pause.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Any,
        device: torch.device,
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._optimizers, self._norms = tuple(optimizers), LateNorms(group, device)
        self._norm: LateTensor | None = None
        self._max_norm = 0.0
        self._clipped: frozenset[int] = frozenset()  # parameters, by id
        self._copies: dict[int, UpdateCopies] = {}
        self._outcomes = deque[bool](maxlen=_LOOKED_AT)
        self._paused = 0
        self.updates = self.made_again = 0
        self.making_again = False

    @property
    def pending(self) -> bool:
        """Return whether the newest update may still have to be made again."""
        return self._norm is not None

    @property
    def paused(self) -> bool:
        """Return whether updates wait for the norm, since many had to be made again."""
        return self._paused > 0

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float, speculate: bool) -> torch.Tensor:
        """Clip gradients by the norm over all ranks, or with ``speculate`` find out later whether that is due.

        Returns the norm before clipping. Called on all ranks, after the batch and before the optimizers' steps.
        """
        own = list(parameters)
        norm = self._norms.norm(own_norm(own))
        if speculate and not self.paused:
            self._norm, self._max_norm, self._clipped = norm, max_norm, frozenset(map(id, own))
            return norm
        self._paused = max(0, self._paused - 1)
        total = norm.arrive()
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)
        return total

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep copies if the update that follows may have to be made again."""
        if self._norm is not None and not self.making_again:
            self._copies[id(optimizer)] = UpdateCopies(optimizer)

    def settle(self) -> bool:
        """Wait for the norm, and make the update again if clipping was due. Return whether it was made again."""
        norm, self._norm = self._norm, None
        if norm is None:
            return False
        copies, self._copies = self._copies, {}
        total = norm.arrive()
        due = not bool(self._max_norm / (total + 1e-6) >= 1.0)  # as torch.nn.utils.clip_grads_with_norm_; NaN is due
        self._count(due)
        if due:
            self.making_again = True
            try:
                for optimizer in self._optimizers:
                    if id(optimizer) in copies:
                        copies[id(optimizer)].make_again(lambda updated: self._clip(updated, total))
            finally:
                self.making_again = False
        return due

    def summary(self) -> str:
        """Return a sentence for the report."""
        return (
            f"optimizer_step post_validated: {self.updates} updates were made before the norm of all gradients was "
            f"known; {self.made_again} of them were made again, since clipping was due"
        )

    def close(self) -> None:
        """Settle, and free the group. Called on all ranks at the same point."""
        self.settle()
        self._norms.close()

    def _clip(self, updated: Sequence[torch.nn.Parameter], total: torch.Tensor) -> None:
        own = [p for p in updated if id(p) in self._clipped]
        torch.nn.utils.clip_grads_with_norm_(own, self._max_norm, total)

    def _count(self, made_again: bool) -> None:
        self.updates += 1
        self.made_again += made_again
        self._outcomes.append(made_again)
        if len(self._outcomes) == _LOOKED_AT and sum(self._outcomes) > _MOST_MADE_AGAIN * _LOOKED_AT:
            self._outcomes.clear()
            self._paused = _PAUSE
            self._warn(
                f"optimizer_step post_validated: more than {_MOST_MADE_AGAIN:.0%} of the last {_LOOKED_AT} updates "
                f"were made again, since gradients were clipped; the next {_PAUSE} updates wait for the norm"
            )


def own_norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of the gradients of this rank's stage."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # tensor-parallel gradients are DTensors


class Redo(list[Any]):
    """A rank's lowered actions, for a runtime with one stage a rank, which settle the update before a backward.

    If the update was made again, the actions before the first backward come again. Messages that were under way are
    received first: a rank knows from the order how many its neighbours have sent.
    """

    def __init__(self, runtime: Any, lowered: dict[int, list[_Action]], validation: PostValidation, again: Any) -> None:
        own = lowered[runtime.rank]
        super().__init__(own)
        self._runtime, self._validation, self._again = runtime, validation, again
        (self._stage,) = runtime._stages
        rank, last = runtime.rank, max(lowered)
        self._prefix = _prefix(own)
        self._rest = own[len(self._prefix) :]
        self._received = _count(self._prefix, _ComputationType.RECV_F)
        self._sent = _count(self._prefix, _ComputationType.SEND_F)
        self._sent_to_us = _count(_prefix(lowered[rank - 1]), _ComputationType.SEND_F) if rank else 0
        self._taken_from_us = _count(_prefix(lowered[rank + 1]), _ComputationType.RECV_F) if rank < last else 0

    def __iter__(self) -> Iterator[_Action]:
        before = _BeforeForwards(self._stage) if self._validation.pending else None
        yield from self._prefix
        if self._validation.settle():
            assert before is not None
            self._finish_messages()
            self._forget_forwards()
            before.put_back()
            self._again()
            for action in self._prefix:
                if action.computation_type is not _ComputationType.RECV_B:  # its gradient is still to come
                    yield action
        yield from self._rest

    def _finish_messages(self) -> None:
        """Receive the activations of old forwards that are under way, and send as many as the next rank waits for."""
        from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p

        runtime, stage = self._runtime, self._stage
        missing = [_batch_p2p(stage.get_fwd_send_ops(0)) for _ in range(self._taken_from_us - self._sent)]
        while runtime.fwd_recv_ops:
            _, works = runtime.fwd_recv_ops.popitem()
            _wait_batch_p2p(works)
        for _ in range(self._sent_to_us - self._received):
            _wait_batch_p2p(_batch_p2p(stage.get_fwd_recv_ops(0)))
        for works in missing:
            _wait_batch_p2p(works)

    def _forget_forwards(self) -> None:
        self._stage.fwd_cache.clear()
        self._stage.output_chunks.clear()
        self._runtime._internal_losses.clear()


class _BeforeForwards:
    """What forwards change besides activations: random numbers, and the buffers of the stage."""

    def __init__(self, stage: Any) -> None:
        self._device = torch.device(stage.device)
        self._cpu = torch.get_rng_state()
        self._of_device = None if self._device.type == "cpu" else self._module.get_rng_state(self._device)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in stage.submod.buffers()]

    @torch.no_grad()
    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._of_device is not None:
            self._module.set_rng_state(self._of_device, self._device)
        for buffer, value in self._buffers:
            buffer.copy_(value)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)


def _prefix(actions: Sequence[_Action]) -> list[_Action]:
    """Return the actions before the first backward."""
    kinds = [action.computation_type for action in actions]
    first = min((kinds.index(kind) for kind in _BACKWARDS if kind in kinds), default=len(kinds))
    return list(actions[:first])


def _count(actions: Sequence[_Action], kind: Any) -> int:
    return sum(action.computation_type is kind for action in actions)
