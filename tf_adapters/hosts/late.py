"""Small values of other ranks, such as a loss or a norm, for which no rank waits before it reads them.

A host that broadcasts its loss at the end of a step makes all ranks of a pipeline meet. Here the message goes over a
gloo group of ours while training goes on. Ranks get tensors that wait for the message when they are used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils.dlpack
from torch.utils._pytree import tree_map

from tf_adapters.errors import UnsupportedError
from tf_adapters.gloo import gloo_group
from tf_adapters.overrides import Overrides


class _Message:
    """Values that are on their way, as a CPU tensor. Any thread may wait for them.

    ``work`` is the transfer, or a Future of the transfer while a device still computes the values.
    """

    def __init__(self, values: torch.Tensor, work: Any) -> None:
        self.values, self._work = values, work
        self._error: Exception | None = None  # of the transfer
        self._waiting = threading.RLock()

    @property
    def arrived(self) -> bool:
        """Return whether ``wait`` would return or raise at once. Never waits."""
        if not self._waiting.acquire(blocking=False):
            return False  # another thread waits
        try:
            if isinstance(self._work, Future) and self._work.done():
                self._attempt(self._finish_sending)
            return self._work is None or (not isinstance(self._work, Future) and bool(self._work.is_completed()))
        finally:
            self._waiting.release()

    def wait(self) -> None:
        """Wait for the message. Each call raises RuntimeError if a rank that it comes from is gone."""
        with self._waiting:
            if self._work is not None:
                self._attempt(self._finish)
            if self._error is not None:
                raise self._error

    def _finish(self) -> None:
        self._finish_sending()
        if self._work is not None:
            self._work.wait()
        self._work = None

    def _finish_sending(self) -> None:
        if isinstance(self._work, Future):
            self._work = self._work.result()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self._error, self._work = error, None


_FACTS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad", "grad_fn")
)
"""Attributes of a tensor that are known before its value has arrived."""


class LateTensor(torch.Tensor):
    """A scalar tensor whose value may still be on its way. Whatever uses the value waits for it.

    Results of operations are plain tensors.
    """

    plain: torch.Tensor
    _message: _Message | None
    _read: Callable[[torch.Tensor], torch.Tensor]
    _reading: threading.RLock

    @staticmethod
    def of(message: _Message, device: torch.device, read: Callable[[torch.Tensor], torch.Tensor]) -> LateTensor:
        """Return a scalar tensor on ``device``, whose value is ``read(message.values)`` once they have arrived.

        Until then its memory holds NaN, for C code that reads the memory and that nobody can make wait.
        """
        plain = torch.zeros((), dtype=message.values.dtype, device=device)
        if plain.is_floating_point():
            plain.fill_(torch.nan)
        late: LateTensor = torch.Tensor._make_subclass(LateTensor, plain)
        late.plain, late._message = plain, message
        late._read, late._reading = read, threading.RLock()
        _EXPORTS.watch(late)
        return late

    def arrive(self) -> torch.Tensor:
        """Wait for the value; return it as a plain tensor of the same storage. Any thread may call it.

        Each call raises RuntimeError if the transfer has failed.
        """
        with self._reading:
            if self._message is not None:
                self._message.wait()
                self.plain.copy_(self._read(self._message.values))
                self._message = None
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


class _Exports:
    """Makes torch's ``to_dlpack`` wait for late values, for as long as there are groups that send them.

    It is the one way to a tensor's memory in torch that asks neither ``__torch_function__`` nor ``__torch_dispatch__``.
    """

    def __init__(self) -> None:
        self._groups = 0
        self._overrides = Overrides()
        self._unread = WeakValueDictionary[int, LateTensor]()

    def watch(self, late: LateTensor) -> None:
        self._unread[id(late)] = late

    def begin(self) -> None:
        if self._groups == 0:
            for module in (torch, torch.utils.dlpack):
                self._overrides.wrap(module, "to_dlpack", lambda export, tensor: export(_arrived(tensor)))
        self._groups += 1

    def end(self) -> None:
        """Restore torch after the last group, when all values are there. A value that failed still says so."""
        self._groups -= 1
        if self._groups > 0:
            return
        for late in list(self._unread.values()):
            with suppress(Exception):
                LateTensor.arrive(late)
        self._unread.clear()
        with suppress(UnsupportedError):  # other code has wrapped the functions since, and calls ours
            self._overrides.restore()


_EXPORTS = _Exports()


class _OwnGroup:
    """Sends messages between the ranks of a host's process group, and keeps each message until it has arrived."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = gloo_group(group), device
        self._messages = deque[_Message]()
        self._sending = ThreadPoolExecutor(1) if device.type != "cpu" else None
        self._close = ExitStack()
        self._close.callback(_EXPORTS.end)
        _EXPORTS.begin()

    def close(self) -> None:
        """Wait for every message, and free the group. Called on all ranks at the same point."""
        with self._close:  # a second call has nothing left to undo
            while self._messages:
                self._messages.popleft().wait()
            if self._sending is not None:
                self._sending.shutdown()
            self._group = None

    def _begin(self, values: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> _Message:
        """Send CPU values with ``start``, at once."""
        return self._keep(_Message(values, start(values)))

    def _begin_when_computed(self, values: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> _Message:
        """Send values with ``start`` as soon as the device has computed them."""
        if self._sending is None:
            return self._begin(values.detach().cpu().clone(), start)
        module = torch.get_device_module(self._device)
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._device.type == "cuda")
        copy.copy_(values.detach(), non_blocking=True)
        event = module.Event()
        event.record(module.current_stream(self._device))

        def begin() -> Any:
            event.synchronize()
            return start(copy)

        return self._keep(_Message(copy, self._sending.submit(begin)))

    def _keep(self, message: _Message) -> _Message:
        while self._messages and self._messages[0].arrived:
            self._messages.popleft().wait()  # it raises what has failed
        self._messages.append(message)
        return message


class LateValues(_OwnGroup):
    """The messages from one rank of ``group`` to the others. Made on all ranks of the group at the same point.

    ``source`` is the sending rank, as numbered in ``group``.
    """

    def __init__(self, group: Any, source: int, device: torch.device) -> None:
        super().__init__(group, device)
        self._source = source

    def send(self, values: torch.Tensor) -> None:
        """Send a 1-d tensor from the source, as soon as the device has computed it."""
        self._begin_when_computed(values, self._broadcast)

    def receive(self, count: int, dtype: torch.dtype = torch.float32) -> Sequence[LateTensor]:
        """Return the next message's ``count`` values on another rank, at once."""
        message = self._begin(torch.zeros(count, dtype=dtype), self._broadcast)
        return [LateTensor.of(message, self._device, itemgetter(place)) for place in range(count)]

    def _broadcast(self, values: torch.Tensor) -> Any:
        return self._group.broadcast(values, self._source)


class LateNorms(_OwnGroup):
    """Norms over all ranks of ``group``, which no rank waits for. Made on all ranks of it at the same point."""

    def norm(self, own: torch.Tensor) -> LateTensor:
        """Return the 2-norm over all ranks, a scalar; ``own`` is this rank's. Called on all ranks in the same order."""
        message = self._begin_when_computed(own.detach().float().square().reshape(1), self._add_up)
        return LateTensor.of(message, self._device, lambda values: values[0].sqrt())

    def _add_up(self, values: torch.Tensor) -> Any:
        return self._group.allreduce([values])
