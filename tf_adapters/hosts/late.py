"""Small values that one rank computes and others may read, which make no rank wait before it reads them.

A host that broadcasts its loss at the end of a step makes all ranks of a pipeline meet. Here the source's message goes
over a gloo group of ours, beside the training. Other ranks get tensors that wait for the message when they are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tf_adapters.gloo import gloo_group

__all__ = ["LateTensor", "LateValues"]


class _Message:
    """Values that are on their way, as a CPU tensor."""

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self.values, self._work = values, work

    @property
    def arrived(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for the message. Raises RuntimeError if the source is gone."""
        if self._work is not None:
            self._work.wait()
            self._work = None


_FACTS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad", "grad_fn")
)
"""What is known of a tensor before its value has arrived."""


class LateTensor(torch.Tensor):
    """A scalar tensor whose value may still be on its way. Whatever uses the value waits for it.

    Results of operations are plain tensors.
    """

    plain: torch.Tensor
    _message: _Message | None
    _place: int

    @staticmethod
    def of(message: _Message, place: int, device: torch.device) -> LateTensor:
        """Return entry ``place`` of the message as a tensor on ``device``."""
        plain = torch.zeros((), dtype=message.values.dtype, device=device)
        late: LateTensor = torch.Tensor._make_subclass(LateTensor, plain)
        late.plain, late._message, late._place = plain, message, place
        return late

    def arrive(self) -> torch.Tensor:
        """Wait for the value; return it as a plain tensor of the same storage."""
        if self._message is not None:
            message, self._message = self._message, None
            message.wait()
            self.plain.copy_(message.values[self._place])
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        use = _plain if func in _FACTS else _arrived
        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(use, args), **tree_map(use, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_arrived, args), **tree_map(_arrived, kwargs or {}))


def _plain(value: Any) -> Any:
    return vars(value)["plain"] if isinstance(value, LateTensor) else value


def _arrived(value: Any) -> Any:
    return LateTensor.arrive(value) if isinstance(value, LateTensor) else value


class LateValues:
    """The messages from one rank of ``group`` to the others. Made on all ranks of the group at the same point.

    Args:
        group: the host's process group of these ranks.
        source: the sending rank, as numbered in ``group``.
        device: where the tensors of the ranks are.
    """

    def __init__(self, group: Any, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = gloo_group(group), source, device
        self._messages = deque[_Message]()  # they must live until they have arrived
        self._copied = ThreadPoolExecutor(1) if device.type != "cpu" else None
        self._copies = deque[Future[None]]()

    def send(self, values: torch.Tensor) -> None:
        """Send a 1-d tensor from the source, as soon as the device has computed it."""
        self._forget_arrived()
        if self._copied is None:
            self._begin(values.detach().cpu().clone())
            return
        module = torch.get_device_module(self._device)
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._device.type == "cuda")
        copy.copy_(values.detach(), non_blocking=True)
        event = module.Event()
        event.record(module.current_stream(self._device))

        def begin() -> None:
            event.synchronize()
            self._begin(copy)

        self._copies.append(self._copied.submit(begin))

    def receive(self, count: int, dtype: torch.dtype = torch.float32) -> Sequence[LateTensor]:
        """Return the next message's ``count`` values on another rank, at once."""
        self._forget_arrived()
        message = self._begin(torch.zeros(count, dtype=dtype))
        return [LateTensor.of(message, place, self._device) for place in range(count)]

    def close(self) -> None:
        """Wait for every message, and give the group back. Called on all ranks at the same point."""
        while self._copies:
            self._copies.popleft().result()
        if self._copied is not None:
            self._copied.shutdown()
        while self._messages:
            self._messages.popleft().wait()
        self._group = None

    def _begin(self, values: torch.Tensor) -> _Message:
        message = _Message(values, self._group.broadcast(values, self._source))
        self._messages.append(message)
        return message

    def _forget_arrived(self) -> None:
        while self._messages and self._messages[0].arrived:
            self._messages.popleft().wait()
        while self._copies and self._copies[0].done():
            self._copies.popleft().result()  # raises what has failed
