"""NeMo AutoModel's own recipe with freezing, on two ranks over gloo: its settings, logs, checkpoints, losses."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from forked_jobs import Told
from trainer_contract import TrainerContract

from tf_adapters.testing.transformer_engine_on_cpu import available

with_automodel = pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed")


@with_automodel
@pytest.mark.programs
class TestAutoModel(TrainerContract):
    module = "automodel_jobs"
    steps, resumed = range(14), range(10, 14)

    def test_a_layer_that_the_loss_trains_is_never_frozen(self, jobs: dict[str, list[Told]]) -> None:
        usual, linear = (jobs[name][0].more["units"][1] for name in ("whole", "linear loss"))
        assert "lm_head.weight" in usual
        assert set(linear) == set(usual) - {"lm_head.weight"}

    def test_without_a_section_nothing_is_frozen(self, jobs: dict[str, list[Told]]) -> None:
        lines = jobs["no section"][0].lines
        assert any('disabled: the config has no "timely_freeze" section' in line for line in lines)
        assert jobs["no section"][1].losses == jobs["alone"][1].losses

    @pytest.mark.parametrize(("exact", "alone"), [("exact", "alone"), ("larger batch, exact", "larger batch")])
    def test_deferral_changes_no_bit(self, jobs: dict[str, list[Told]], exact: str, alone: str) -> None:
        assert any("99% of a stage's weight-gradient work can be deferred" in line for line in lines_of(jobs, exact))
        check_deferred(jobs, exact, alone)

    def test_deferred_tokens_are_sampled(self, jobs: dict[str, list[Told]]) -> None:
        assert jobs["tokens"][1].losses != jobs["alone"][1].losses
        assert any("stable freezing" in line for line in lines_of(jobs, "tokens"))


def lines_of(jobs: dict[str, list[Told]], name: str) -> list[str]:
    return jobs[name][0].lines


def check_deferred(jobs: dict[str, list[Told]], exact: str, alone: str) -> None:
    """The same bits, where FSDP computes in bf16 and adds gradients up in fp32."""
    assert any("deferral: weight gradients that can wait" in line for line in lines_of(jobs, exact))
    for mine, theirs in zip(jobs[exact], jobs[alone], strict=True):
        assert mine.losses == theirs.losses
        assert mine.parameters == theirs.parameters


@with_automodel
@pytest.mark.skipif(not available(), reason="transformer-engine is not installed")
@pytest.mark.programs
class TestTransformerEngine(TrainerContract):
    module = "automodel_engine_jobs"
    steps, resumed = range(14), range(10, 14)

    def test_its_layers_are_among_those_that_are_frozen(self, jobs: dict[str, list[Told]]) -> None:
        assert "transformer_engine" in jobs["whole"][0].more["packages"]
        assert any("self_attn.q_proj" in name for name in jobs["whole"][0].more["units"][0])

    def test_deferral_changes_no_bit(self, jobs: dict[str, list[Told]]) -> None:
        check_deferred(jobs, "larger batch, exact", "larger batch")

    def test_deferred_tokens_are_sampled(self, jobs: dict[str, list[Told]]) -> None:
        assert jobs["tokens"][1].losses != jobs["alone"][1].losses
