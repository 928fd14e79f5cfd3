"""Megatron-LM's unedited pretrain_gpt.py with Transformer Engine's layers, its default, on two CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from example_runs import freezing
from launching import ROOT, torchrun

from tf_adapters.report import Report
from tf_adapters.schedule.ir import Kind
from tf_adapters.testing.transformer_engine_on_cpu import FOLDER

SOURCE = os.environ.get("MEGATRON_LM_SOURCE", "")
pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(not SOURCE, reason="MEGATRON_LM_SOURCE names no checkout of Megatron-LM"),
    pytest.mark.skipif(importlib.util.find_spec("six") is None, reason="Megatron-LM needs six: pip install six"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None and not FOLDER.exists(),
        reason="no Transformer Engine here: make puts it into a folder of its own",
    ),
]
STEPS = 10
ON_CPU = ("tf_adapters.testing.megatron_lm_on_cpu", "--transformer-engine")
ARGUMENTS = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --split 90,5,5
    --attention-backend unfused --distributed-backend gloo --pipeline-model-parallel-size 2
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 1 --train-iters {STEPS}
    --eval-interval 100 --eval-iters 1 --log-interval 1
""".split()


def train(*arguments: str, through: tuple[str, ...] = ("-m", "tf_adapters.megatron")) -> str:
    """All that the script said on two ranks."""
    command = (*ON_CPU, *through, "pretrain_gpt.py", *ARGUMENTS, *arguments)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, output = torchrun("-m", *command, cwd=Path(SOURCE), PYTHONPATH=paths)
    assert code == 0, output[-4000:]
    return output


def deferring(folder: Path, ratio: float) -> list[str]:
    return freezing(folder, **{"weight-gradients": "deferred", "max-freeze-ratio": ratio})


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r" iteration +(\d+)/.*? lm loss: (\S+)", output)}


@pytest.fixture(scope="module")
def alone() -> dict[int, str]:
    return losses(train(through=()))


def test_deferral_without_freezing_keeps_the_losses(alone: dict[int, str], tmp_path: Path) -> None:
    assert list(alone) == list(range(1, STEPS + 1))
    assert losses(train(*deferring(tmp_path, 0.0))) == alone
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert report.plan is not None
    assert set(report.plan.freeze_ratio.values()) == {0.0}
    check_deferred(report)


def test_it_freezes_and_defers(alone: dict[int, str], tmp_path: Path) -> None:
    output = train(*deferring(tmp_path, 0.8))
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    check_deferred(report)
    assert losses(output)[1] == alone[1]
    assert losses(output)[STEPS] != alone[STEPS]
    assert "timely_freeze: deferral: weight gradients that can wait are" in output


V = ("--timely-freeze-placement", "v")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def test_a_v_goes_on_from_a_checkpoint_of_1f1b_and_1f1b_from_that_of_a_v(tmp_path: Path) -> None:
    """The last step may differ in its last digit, since ranks add up the norm for clipping in another order."""
    saving = (*NO_DROPOUT, "--save-interval", str(STEPS // 2), "--save")
    for name, first, first_through, then in (
        ("from 1F1B", (), (), (*deferring(tmp_path / "b", 0.0), *V)),
        ("from a V", (*deferring(tmp_path / "a", 0.0), *V), ("-m", "tf_adapters.megatron"), ()),
    ):
        folder = tmp_path / name
        train(*saving, str(folder), *first, through=first_through)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS // 2))
        loading = (*NO_DROPOUT, "--load", str(folder))
        same_placement = losses(train(*loading, *first, through=first_through))
        other_placement = losses(train(*loading, *then, through=("-m", "tf_adapters.megatron") if then else ()))
        assert list(other_placement) == list(range(STEPS // 2 + 1, STEPS + 1))
        for step, loss in same_placement.items():
            assert float(other_placement[step]) == pytest.approx(float(loss), abs=2e-6), (name, step)


def check_deferred(report: Report) -> None:
    """The run ended in stable freezing, and its plan computes weight gradients apart from their backwards."""
    assert report.status == "stable"
    assert report.plan is not None
    assert report.plan.schedule is not None
    assert any(action.kind is Kind.WEIGHT_GRAD for row in report.plan.schedule.ranks for action in row)
