"""The Megatron-Core example on two ranks, with freezing and without, and what its arguments refuse."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from example_runs import PHASES, SAVED_AT, STEPS, freezing, held_out, losses, said
from launching import ROOT, forked
from rank_pools import fork_ranks

from tf_adapters.testing import RankPool

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.programs

TINY = ("--layers", "4", "--hidden", "16", "--context", "8", "--microbatches", "4", "--log-every", "1")


def train(*arguments: object) -> tuple[int, str]:
    return forked("examples/megatron_gpt/train.py", *TINY, *arguments)


def test_it_trains_through_all_phases_and_resumes_with_the_same_losses(tmp_path: Path) -> None:
    arguments = ("--virtual-pipeline", 2, "--steps", STEPS, *freezing(tmp_path))
    code, output = train(*arguments, "--save-dir", tmp_path, "--save-every", SAVED_AT)
    assert code == 0, output
    assert [line for line in said(output) if line.startswith("step ")] == PHASES
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["host"]["name"] == "megatron-core"
    assert set(report["measured"]["mean_afr"]) == {"0", "1", "2", "3"}
    assert sorted(losses(output)) == list(range(1, STEPS + 1))

    code, resumed = train(*arguments, "--load-dir", tmp_path / f"step_{SAVED_AT}")
    assert code == 0, resumed
    assert f"resumed after step {SAVED_AT}: stable freezing" in said(resumed)
    assert losses(resumed) == {step: loss for step, loss in losses(output).items() if step > SAVED_AT}
    assert held_out(resumed) == held_out(output)


def test_it_learns_without_freezing(tmp_path: Path) -> None:
    code, output = train("--steps", 40, "--lr", "0.01", "--eval-every", 20)
    assert code == 0, output
    assert said(output) == []
    found = [float(loss) for _, loss in sorted(losses(output).items())]
    assert found[-1] < found[0] - 1
    half, whole = held_out(output)
    assert whole < half


def test_a_bad_argument_ends_the_job_before_it_trains() -> None:
    code, output = train("--timely-freeze", "--timely-freeze-max-freeze-ratio", "1.5")
    assert code not in (0, -signal.SIGKILL)
    line = "train.py: error: --timely-freeze-max-freeze-ratio is '1.5': allowed is a number from 0 to 1"
    assert line in output
    assert "usage:" not in output
    assert losses(output) == {}


# --- the script's parts, on ranks that run already -----------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with fork_ranks(2, prepare_rank) as pool:
        yield pool


def prepare_rank() -> None:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "megatron_gpt")]
    import device

    device.join_ranks()


def test_shards_over_replicas_train_and_resume(ranks: RankPool, tmp_path: Path) -> None:
    for straight, resumed in ranks.run(train_and_resume, tmp_path):
        assert resumed == straight


def train_and_resume(folder: Path) -> tuple[list[float], list[float]]:
    """On a rank: the last losses of a training, and those of another that goes on from its checkpoint."""
    from model import Sizes
    from text import ByteDataset, load_text, split
    from trainer import Trainer

    more = {"distributed_optimizer": True, "bf16": True, "recompute": True, "tied": True}
    sizes = Sizes(pipeline=1, layers=2, hidden=16, context=8, microbatches=2, **more)
    text = ByteDataset(split(load_text("topics"))[0], sizes.context)

    def last_losses(trainer: Any) -> list[float]:
        data = trainer.data(text, trainer.finished_steps)
        return [*(trainer.step(data).item() for _ in range(3)), trainer.evaluate(text).item()]

    first, second = Trainer(sizes), Trainer(sizes)
    data = first.data(text)
    for _ in range(2):
        first.step(data)
    first.save(folder)
    second.load(folder)
    return last_losses(first), last_losses(second)


REFUSED = {
    "--timely-freeze-seed 3": (
        "--timely-freeze-seed is 3, but --timely-freeze is not given: give it, or leave --timely-freeze-seed out"
    ),
    "--pipeline 3": "layers is 4: it must be a multiple of 3 here",
    "--pipeline 4": "pipeline x tensor is 4: start a multiple of that many processes with torchrun",
    "--virtual-pipeline 2 --microbatches 3": "microbatches is 3: it must be a multiple of 2 here",
    "--virtual-pipeline 2 --pipeline 1": "virtual_pipeline is 2, which needs a pipeline of several ranks",
    "--micro-batch 0": "micro_batch is 0: it must be at least 1",
    "--log-every 0": "argument --log-every: 0 is not at least 1",
    "--no-such-option": "unrecognized arguments: --no-such-option",
}


def test_each_bad_argument_is_one_line(ranks: RankPool) -> None:
    for refused in ranks.run(refusals, list(REFUSED)):
        assert refused == [(2, f"train.py: error: {line}\n") for line in REFUSED.values()]


def refusals(lines: list[str]) -> list[tuple[Any, str]]:
    """On a rank: how the script exits for each line of arguments, and what it says."""
    import train

    found = []
    for line in lines:
        said_now, sys.argv = io.StringIO(), ["train.py", *TINY, *line.split()]
        with redirect_stderr(said_now), pytest.raises(SystemExit) as caught:
            train.parse_args()
        found.append((caught.value.code, said_now.getvalue()))
    return found


def test_a_checkpoint_that_is_not_there_or_of_another_size_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for rank, (missing, other) in enumerate(ranks.run(wrong_checkpoints, tmp_path)):
        assert missing == f"no such checkpoint: {tmp_path / 'nowhere' / f'rank_{rank}.pt'}"
        assert other.startswith(f"the checkpoint in {tmp_path} has other sizes: Sizes(pipeline=1, ")


def wrong_checkpoints(folder: Path) -> list[str]:
    """On a rank: why loading a checkpoint was refused."""
    from model import Sizes
    from trainer import Trainer

    small, large = (Trainer(Sizes(pipeline=1, layers=1, hidden=hidden, context=8)) for hidden in (16, 32))
    small.save(folder)
    found = []
    for where in (folder / "nowhere", folder):
        with pytest.raises(SystemExit) as caught:
            large.load(where)
        found.append(str(caught.value))
    return found
