"""The rank pool that the distributed tests stand on: failures end in time, and it works again afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pools import destroy_groups, fork_ranks

from tf_adapters.testing import RankPool
from tf_adapters.testing.ranks import RanksFailed, free_port

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with fork_ranks(2) as started:
        yield started


def total(value: float) -> tuple[int, float]:
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank raises")
    dist.barrier()


def raise_on_both() -> None:
    raise ValueError(f"rank {dist.get_rank()} raises")


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def hang_on_rank_0() -> int:
    if dist.get_rank() == 0:
        time.sleep(600)
    return dist.get_rank()


def returns_what_cannot_be_sent() -> object:
    return lambda: None


def is_ready(pool: RankPool) -> bool:
    return [value for _, value in pool.run(total, 2.0)] == [6.0, 6.0]


def test_results_come_by_rank_and_the_processes_stay(pool: RankPool) -> None:
    first, second = pool.run(total, 1.0), pool.run(total, 2.0)
    assert [value for _, value in first] == [3.0, 3.0]
    assert [value for _, value in second] == [6.0, 6.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3


def test_a_rank_that_raises_ends_the_call_with_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(raise_on_rank_1)
    text = str(caught.value)
    assert "rank 1:\nTraceback" in text
    assert "ValueError: this rank raises" in text
    assert "in raise_on_rank_1" in text
    assert is_ready(pool)


def test_every_rank_that_raises_is_heard(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(raise_on_both)
    assert "ValueError: rank 0 raises" in str(caught.value)
    assert "ValueError: rank 1 raises" in str(caught.value)
    assert is_ready(pool)


def test_a_rank_that_dies_is_named_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1:\ndied with exit code 7"):
        pool.run(die_on_rank_1)
    assert is_ready(pool)


def test_a_rank_that_hangs_ends_with_the_timeout(pool: RankPool) -> None:
    assert is_ready(pool)  # started: what follows measures no start-up
    with pytest.raises(RanksFailed) as caught:
        pool.run(hang_on_rank_0, timeout_s=2.0)
    assert str(caught.value) == "rank 0:\nno answer in time"
    assert is_ready(pool)


def test_a_result_that_cannot_be_sent_is_a_failure_of_that_rank(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(returns_what_cannot_be_sent)
    assert is_ready(pool)


def test_processes_are_gone_after_closing() -> None:
    with RankPool(1) as pool:
        (pid, _), *_ = pool.run(total, 1.0)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def failing_setup() -> None:
    raise RuntimeError("the setup broke")


def test_a_setup_that_fails_ends_the_call() -> None:
    with fork_ranks(2, failing_setup) as pool, pytest.raises(RanksFailed, match="the setup broke"):
        pool.run(total, 1.0)


def groups() -> int:
    dist.new_group()
    return len(dist.distributed_c10d._world.pg_map)


def test_a_teardown_runs_after_every_call() -> None:
    with fork_ranks(2, teardown=destroy_groups) as pool:
        assert [pool.run(groups) for _ in range(3)] == [[2, 2]] * 3


def test_a_teardown_that_fails_is_a_failure_of_the_call() -> None:
    with fork_ranks(2, teardown=failing_setup) as pool, pytest.raises(RanksFailed, match="the setup broke"):
        pool.run(groups)


def test_ranks_end_with_a_parent_that_is_killed_while_they_wait() -> None:
    script = (
        f"import {__name__} as t\n"
        "if __name__ == '__main__':\n"
        "    with t.RankPool(2) as pool:\n"
        "        print(*(pid for pid, _ in pool.run(t.total, 1.0)), flush=True)\n"
        "        pool.run(t.hang_on_rank_0)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether it is, and no zombie that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_free_port_is_none_that_an_outgoing_connection_is_given():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= 11_000:
        pytest.skip("this system gives nearly all ports to outgoing connections")
    ports = [free_port() for _ in range(50)]
    assert max(ports) < lowest
    assert len(set(ports)) > 45
    with socket.create_server(("", ports[0])):
        assert all(free_port() != ports[0] for _ in range(50))
