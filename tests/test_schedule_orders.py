"""The generated GPipe and looped BFS orders are those of torch.distributed.pipelining, action for action."""

import pytest

pytest.importorskip("torch")
from tf_adapters.schedule import orders
from tf_adapters.torch_pipelining.named import named_schedule


@pytest.mark.parametrize("ranks", range(1, 9))
def test_gpipe_is_torchs(ranks: int) -> None:
    for microbatches in range(1, 25):
        assert orders.gpipe(ranks, microbatches) == named_schedule("gpipe", ranks, microbatches)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_looped_bfs_is_torchs(ranks: int, stages_per_rank: int) -> None:
    for microbatches in range(1, 25):
        expected = named_schedule("looped_bfs", ranks, microbatches, stages_per_rank)
        assert orders.looped_bfs(ranks, microbatches, stages_per_rank) == expected
