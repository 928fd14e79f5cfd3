"""ms-swift's own Megatron trainer with freezing, on two ranks over gloo; see ``swift_jobs``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from forked_jobs import Told
from trainer_contract import TrainerContract


@pytest.mark.skipif(
    find_spec("swift") is None or find_spec("swift.megatron") is None, reason="ms-swift is not installed"
)
@pytest.mark.programs
class TestSwift(TrainerContract):
    module = "swift_jobs"

    def test_it_detaches_at_the_end(self, jobs: dict[str, list[Told]]) -> None:
        assert all(told.more["detached"] for name, ranks in jobs.items() for told in ranks if not told.error)
