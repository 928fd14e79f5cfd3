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


def check_deferred(report: Report) -> None:
    """The run ended in stable freezing, and its plan computes weight gradients apart from their backwards."""
    assert report.status == "stable"
    assert report.plan is not None
    assert report.plan.schedule is not None
    assert any(action.kind is Kind.WEIGHT_GRAD for row in report.plan.schedule.ranks for action in row)
