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
    refused = ("deferred",)
    steps, resumed = range(14), range(10, 14)

    def test_a_layer_that_the_loss_trains_is_never_frozen(self, jobs: dict[str, list[Told]]) -> None:
        usual, linear = (jobs[name][0].more["units"][1] for name in ("whole", "linear loss"))
        assert "lm_head.weight" in usual
        assert set(linear) == set(usual) - {"lm_head.weight"}

    def test_without_a_section_nothing_is_frozen(self, jobs: dict[str, list[Told]]) -> None:
        lines = jobs["no section"][0].lines
        assert any('disabled: the config has no "timely_freeze" section' in line for line in lines)
        assert jobs["no section"][1].losses == jobs["alone"][1].losses

    def test_deferral_is_refused(self, jobs: dict[str, list[Told]]) -> None:
        assert any("weight gradients apart from the backward" in line for line in jobs["deferred"][0].lines)


@with_automodel
@pytest.mark.skipif(not available(), reason="transformer-engine is not installed")
@pytest.mark.programs
class TestTransformerEngine(TrainerContract):
    module = "automodel_engine_jobs"
    steps, resumed = range(14), range(10, 14)

    def test_its_layers_are_among_those_that_are_frozen(self, jobs: dict[str, list[Told]]) -> None:
        assert "transformer_engine" in jobs["whole"][0].more["packages"]
        assert any("self_attn.q_proj" in name for name in jobs["whole"][0].more["units"][0])
