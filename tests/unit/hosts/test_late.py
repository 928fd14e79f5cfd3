"""Values that arrive late: what a tensor does before and after, on two ranks over gloo."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pools import fork_ranks

from tf_adapters.hosts.late import LateNorms, LateTensor, LateValues, _Message
from tf_adapters.testing import RankPool

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with fork_ranks(2) as started:
        yield started


def _added(late: torch.Tensor) -> Any:
    late += 1.0
    return float(late)


def _all_reduced(late: torch.Tensor) -> float:
    """An operation of torch.distributed takes the tensor's memory, not its value."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.all_reduce(late, group=group)
    return late.item()


def _saved(late: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(late, file)
    file.seek(0)
    value: torch.Tensor = torch.load(file)
    return value


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda late: late.item(),
    "float": float,
    "format": lambda late: f"{late:0.2f}",
    "repr": repr,
    "sum": lambda late: (late + 1.0).item(),
    "sum, reversed": lambda late: (1.0 + late).item(),
    "in place": _added,
    "compared": lambda late: bool(late > 2.0),
    "numpy": lambda late: late.numpy().tolist(),
    "array": lambda late: np.asarray(late).tolist(),
    "list": lambda late: late.tolist(),
    "stacked": lambda late: torch.stack([late, late]).tolist(),
    "copied": lambda late: copy.deepcopy(late).item(),
    "cloned": lambda late: late.detach().clone().item(),
    "pickled": lambda late: pickle.loads(pickle.dumps(late)).item(),
    "another type": lambda late: late.double().item(),
    "to": lambda late: late.to("cpu", torch.float64).item(),
    "all reduced": _all_reduced,
    "mean": lambda late: late.mean().item(),
    "storage": lambda late: late.storage().tolist(),
    "data": lambda late: late.data.item(),
    "shallow copy": lambda late: copy.copy(late).item(),
    "saved": lambda late: _saved(late).item(),
    "dlpack, exported": lambda late: torch.from_dlpack(torch.utils.dlpack.to_dlpack(late)).item(),
    "dlpack, exported by torch": lambda late: torch.from_dlpack(torch.to_dlpack(late)).item(),
    "dlpack, its method": lambda late: torch.from_dlpack(late.__dlpack__()).item(),
    "dlpack, numpy": lambda late: np.from_dlpack(late).tolist(),
    "address": lambda late: ctypes.c_float.from_address(late.data_ptr()).value,
    "memory": lambda late: late.data_ptr() != 0 and late.item(),
}


def used(name: str) -> list[Any]:
    """On rank 1: the use of a late value, and of a plain one; rank 0 sends only after rank 1 has the tensor."""
    values = LateValues(None, 0, CPU)
    try:
        if dist.get_rank() == 0:
            dist.barrier()  # rank 1 has its tensors
            values.send(torch.tensor([7.0, 2.5]))
            return []
        _, late = values.receive(2)
        assert isinstance(late, LateTensor)
        assert (late.shape, late.dtype, late.device, late.requires_grad) == ((), torch.float32, CPU, False)
        dist.barrier()
        plain = torch.tensor(2.5)
        found = [USES[name](late), USES[name](plain)]
        assert type(late + 1) is torch.Tensor
        return found
    finally:
        values.close()


@pytest.mark.parametrize("name", USES)
def test_every_use_waits_for_the_value(pool: RankPool, name: str) -> None:
    _, (late, plain) = pool.run(used, name)
    assert late == plain


def in_threads(use: Callable[[int], Any], begun: Callable[[], None] = lambda: None) -> list[Any]:
    """What four threads get from ``use``, or their errors. ``begun`` is called once all of them run."""
    found: list[Any] = [None] * 4
    barrier = threading.Barrier(len(found) + 1)

    def read(number: int) -> None:
        barrier.wait()
        try:
            found[number] = use(number)
        except RuntimeError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    barrier.wait()
    begun()
    for thread in threads:
        thread.join()
    return found


def read_in_threads(_: int) -> list[Any]:
    """On rank 1: what four threads read of two values of one message. Rank 0 sends once all of them run."""
    values = LateValues(None, 0, CPU)
    found: list[Any] = []
    if dist.get_rank() == 0:
        dist.barrier()
        values.send(torch.tensor([7.0, 2.5]))
    else:
        late = values.receive(2)
        found = in_threads(lambda number: float(late[number % 2]), dist.barrier)
    values.close()
    return found


def test_every_thread_gets_the_value(pool: RankPool) -> None:
    assert pool.run(read_in_threads, 0) == [[], [7.0, 2.5, 7.0, 2.5]]


def test_every_reader_gets_the_error_of_the_transfer() -> None:
    sending: Future[Any] = Future()
    message = _Message(torch.zeros(1), sending)
    late = [LateTensor.of(message, CPU, lambda values: values[0]) for _ in range(2)]
    assert not message.arrived
    assert in_threads(lambda n: float(late[n % 2]), lambda: sending.set_exception(RuntimeError("gone"))) == ["gone"] * 4
    assert message.arrived
    with pytest.raises(RuntimeError, match="gone"):
        float(late[0])


def exports_are_torchs(_: int) -> tuple[bool, bool]:
    """Whether ``to_dlpack`` is torch's own while two groups are open, and after both are closed."""
    before = torch.utils.dlpack.to_dlpack
    first, second = LateValues(None, 0, CPU), LateNorms(None, CPU)
    first.close()
    first.close()
    during = torch.utils.dlpack.to_dlpack is before
    second.close()
    return during, torch.utils.dlpack.to_dlpack is before and torch.to_dlpack is before


def test_torch_is_as_before_once_nothing_is_late(pool: RankPool) -> None:
    assert pool.run(exports_are_torchs, 0) == [(False, True)] * 2


def in_order(count: int) -> list[float]:
    """Rank 1 reads nothing before the end: rank 0 has sent ``count`` messages by then."""
    values = LateValues(None, 0, CPU)
    received = []
    for number in range(count):
        if dist.get_rank() == 0:
            values.send(torch.tensor([float(number)]))
        else:
            received += values.receive(1)
    values.close()
    return [float(value) for value in received]


def test_messages_arrive_in_order_and_stay_when_closed(pool: RankPool) -> None:
    assert pool.run(in_order, 20) == [[], [float(number) for number in range(20)]]


def dropped() -> int:
    """Tensors that nobody reads; their messages must not outlive the group."""
    values = LateValues(None, 0, CPU)
    for _ in range(50):
        if dist.get_rank() == 0:
            values.send(torch.zeros(1))
        else:
            values.receive(1)
        values._messages[-1].wait()
    left = len(values._messages)
    values.close()
    return left


def test_values_that_nobody_reads_are_freed(pool: RankPool) -> None:
    assert pool.run(dropped) == [1, 1]


class SlowEvent:
    """Stands for a device's event that is passed late."""

    def record(self, stream: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        import time

        assert self.recorded
        time.sleep(0.05)


def on_a_device() -> list[float]:
    """The way of an accelerator, whose event is passed late, with tensors on the CPU."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace
    from unittest import mock

    module = SimpleNamespace(Event=SlowEvent, current_stream=lambda device: None)
    values = LateValues(None, 0, CPU)
    values._sending = ThreadPoolExecutor(1)
    received = []
    with mock.patch.object(torch, "get_device_module", return_value=module):
        for number in range(5):
            if dist.get_rank() == 0:
                values.send(torch.tensor([float(number)]))
            else:
                received += values.receive(1)
        values.close()
    return [float(value) for value in received]


def test_a_source_with_a_device_sends_once_the_device_is_done(pool: RankPool) -> None:
    assert pool.run(on_a_device) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]


def norms(on_device: bool) -> list[Any]:
    """Norms of three steps, read at the end, and how many of the tensors were late."""
    from concurrent.futures import ThreadPoolExecutor
    from types import SimpleNamespace
    from unittest import mock

    module = SimpleNamespace(Event=SlowEvent, current_stream=lambda device: None)
    late = LateNorms(None, CPU)
    if on_device:
        late._sending = ThreadPoolExecutor(1)
    own = [3.0, 4.0][dist.get_rank()]
    with mock.patch.object(torch, "get_device_module", return_value=module):
        found = [late.norm(torch.tensor(own * step)) for step in range(1, 4)]
    assert all(isinstance(norm, LateTensor) for norm in found)
    texts = [f"{norm:.2f}" for norm in found]
    late.close()
    return [texts, [float(norm) for norm in found]]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_norm_over_all_ranks_is_late(pool: RankPool, on_device: bool) -> None:
    assert pool.run(norms, on_device) == [[["5.00", "10.00", "15.00"], [5.0, 10.0, 15.0]]] * 2
