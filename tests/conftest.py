from __future__ import annotations

from pathlib import Path

import pytest

from tf_adapters.testing import RankPool


@pytest.fixture(scope="session")
def pools():
    """Rank pools for DeepSpeed by size, one at a time: there are two cores."""
    import deepspeed_ranks

    started: dict[int, RankPool] = {}
    before = shared_buffers()

    def get(size: int) -> RankPool:
        if size not in started:
            close()
            started[size] = RankPool(size, deepspeed_ranks.setup)
        return started[size]

    def close() -> None:
        for pool in started.values():
            pool.close()
        started.clear()
        for buffer in shared_buffers() - before:
            buffer.unlink(missing_ok=True)

    yield get
    close()


def shared_buffers() -> set[Path]:
    """Shared memory that DeepSpeed's CPU backend leaves behind, 69 MB for each rank."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
