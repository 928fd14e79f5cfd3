"""Post-validated updates on torch's runtime: clipping over all stages, and forwards that run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action, _batch_p2p, _ComputationType, _wait_batch_p2p

from tf_adapters.hosts.forwards_again import BeforeForwards
from tf_adapters.hosts.post_validation import PostValidation
from tf_adapters.training.controller import Controller

_BACKWARDS = (_ComputationType.RECV_B, _ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)


class TorchPostValidation(PostValidation):
    """Clips as ``torch.nn.utils.clip_grads_with_norm_`` does."""

    def __init__(self, group: Any, device: torch.device, controller: Controller) -> None:
        super().__init__(group, device, controller)
        self._max_norm = 0.0
        self._clipped: frozenset[int] = frozenset()  # parameters, by id

    def clip(self, own: Sequence[torch.nn.Parameter], max_norm: float, speculate: bool) -> torch.Tensor:
        """Clip the gradients of ``own`` by the norm over all ranks, or with ``speculate`` find out later if it is due.

        Returns the norm before clipping. Called on all ranks, after the batch and before the optimizers' steps.
        """
        if self.speculates(speculate):
            self._max_norm, self._clipped = max_norm, frozenset(map(id, own))
            return self.expect(own_norm(own))
        total = self._norms.norm(own_norm(own)).arrive()
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)
        return total

    def is_due(self, square: torch.Tensor) -> bool:
        return not bool(self._max_norm / (square.sqrt() + 1e-6) >= 1.0)  # NaN is due

    def clip_again(self, parameters: list[torch.nn.Parameter], square: torch.Tensor) -> None:
        own = [p for p in parameters if id(p) in self._clipped]
        torch.nn.utils.clip_grads_with_norm_(own, self._max_norm, square.sqrt())


def own_norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of these parameters' gradients on this rank."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # tensor-parallel gradients are DTensors


class Redo(list[Any]):
    """A rank's lowered actions, for a runtime with one stage a rank, which settle the update before a backward.

    If the update was made again, the actions before the first backward come again. Messages that were under way are
    received first: a rank knows from the order how many the previous rank has sent.
    """

    def __init__(
        self,
        runtime: Any,
        lowered: dict[int, list[_Action]],
        validation: PostValidation,
        begin_again: Callable[[], None],
    ) -> None:
        own = lowered[runtime.rank]
        super().__init__(own)
        self._runtime, self._validation, self._begin_again = runtime, validation, begin_again
        (self._stage,) = runtime._stages
        rank = runtime.rank
        self._prefix = before_backwards(own)
        self._rest = own[len(self._prefix) :]
        sent = _count(before_backwards(lowered[rank - 1]), _ComputationType.SEND_F) if rank else 0
        self._unreceived = sent - _count(self._prefix, _ComputationType.RECV_F)

    def __iter__(self) -> Iterator[_Action]:
        device = torch.device(self._stage.device)
        before = BeforeForwards([self._stage.submod], device) if self._validation.pending else None
        yield from self._prefix
        if self._validation.settle():
            assert before is not None
            self._finish_messages()
            for old in (self._stage.fwd_cache, self._stage.output_chunks, self._runtime._internal_losses):
                old.clear()
            before.put_back()
            self._begin_again()
            if isinstance(self._stage.submod, FSDPModule):
                # FSDP frees its gathered copies of the old weights. The first action gathers the new ones.
                self._runtime._assert_unsharded(self._stage)
                yield _Action(self._stage.stage_index, _ComputationType.RESHARD, None)
            yield from self._prefix
        yield from self._rest

    def __deepcopy__(self, memo: Any) -> list[_Action]:
        """Return the plain actions: torch copies an order to print it beside an error."""
        return self._prefix + self._rest

    def _finish_messages(self) -> None:
        """Receive the activations of old forwards that are under way. A receive never begins before its send."""
        runtime, stage = self._runtime, self._stage
        while runtime.fwd_recv_ops:
            _, works = runtime.fwd_recv_ops.popitem()
            _wait_batch_p2p(works)
        for _ in range(self._unreceived):
            _wait_batch_p2p(_batch_p2p(stage.get_fwd_recv_ops(0)))


def before_backwards(actions: Sequence[_Action]) -> list[_Action]:
    """Return the actions before the first one of a backward.

    A receive of a gradient counts: NCCL would not begin to send an activation again before that receive has ended.
    """
    kinds = [action.computation_type for action in actions]
    first = min((kinds.index(kind) for kind in _BACKWARDS if kind in kinds), default=len(kinds))
    return list(actions[:first])


def _count(actions: Sequence[_Action], kind: Any) -> int:
    return sum(action.computation_type is kind for action in actions)
