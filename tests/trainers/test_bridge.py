"""The callback in Megatron-Bridge's own ``pretrain`` on two ranks: freezing, checkpoints, refusals."""

from __future__ import annotations

import json
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_jobs import Told
from megatron_bridge_jobs import SAVED
from trainer_contract import TrainerContract

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.report import Report
from tf_adapters.testing.transformer_engine_on_cpu import available

# --- real trainings ------------------------------------------------------------------------------------------------


with_bridge = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
)


class BridgeContract(TrainerContract):
    resumed = range(SAVED + 1, 13)

    def test_the_trainer_logs_its_figures(self, jobs: dict[str, list[Told]], folder: Path) -> None:  # type: ignore[override]
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert jobs["whole"][0].error == ""
        events = EventAccumulator(str(folder / "run" / "logs"))
        events.Reload()
        assert [event.step for event in events.Scalars("timely-freeze/afr_stage_0")] == list(range(1, 13))
        assert "timely-freeze/planned_step_ms" in events.Tags()["scalars"]


@with_bridge
@pytest.mark.programs
class TestTrainings(BridgeContract):
    module = "megatron_bridge_jobs"
    refused = ("refused",)

    def test_it_says_what_it_does_on_the_first_rank(self, jobs: dict[str, list[Told]]) -> None:
        ranks = jobs["whole"]
        assert ranks[0].more["events"] == ["train", *["evaluation"] * 3, "end", "evaluation"]
        assert "enabled: megatron-core" in ranks[0].said
        assert "2 stages x 4 microbatches" in ranks[0].said
        assert "warm-up to step 2, monitoring to 6" in ranks[0].said  # the scheduler's two iterations
        assert "stable freezing" in ranks[0].said
        assert not any("timely_freeze: " in line for line in ranks[1].lines)

    def test_where_it_is_not_enabled_bridge_trains_alone(self, jobs: dict[str, list[Told]]) -> None:
        alone = jobs["alone"][1].losses
        assert jobs["disabled"][1].losses == {step: alone[step] for step in (1, 2)}
        assert "disabled" in jobs["disabled"][0].said

    def test_its_checkpoint_loads_without_us(self, jobs: dict[str, list[Told]]) -> None:
        assert list(jobs["without us"][1].losses) == list(self.resumed)

    def test_a_checkpoint_without_a_state_begins_freezing_anew(self, jobs: dict[str, list[Told]]) -> None:
        alone, losses = jobs["alone"][1].losses, jobs["without a state"][1].losses
        assert list(losses) == list(self.resumed)
        assert losses[7] == alone[7]  # monitoring changes nothing in its first step
        assert "resumed after step 0: " in jobs["without a state"][0].said

    def test_every_checkpoint_has_the_state_of_its_own_step(self, jobs: dict[str, list[Told]], folder: Path) -> None:
        assert jobs["whole"][0].error == ""
        for step in (SAVED, 2 * SAVED):
            saved = torch.load(folder / "run" / f"iter_{step:07d}" / "train_state.pt", weights_only=True)
            assert json.loads(bytes(saved["timely_freeze"].tolist()))["completed_steps"] == step
        alone = torch.load(folder / "alone" / f"iter_{SAVED:07d}" / "train_state.pt", weights_only=True)
        assert "timely_freeze" not in alone

    def test_two_replicas_without_a_pipeline_freeze_too(self, jobs: dict[str, list[Told]]) -> None:
        first, second = jobs["no pipeline"]
        assert "1 stage x 2 microbatches" in first.said
        assert first.parameters == second.parameters != ""

    def test_an_evaluation_attaches_nothing(self, jobs: dict[str, list[Told]]) -> None:
        assert jobs["evaluated only"][1].losses == {}
        assert not any("timely_freeze: " in line for line in jobs["evaluated only"][0].lines)

    def test_what_cannot_be_right_is_the_same_line_on_all_ranks(self, jobs: dict[str, list[Told]]) -> None:
        first, second = (told.error.splitlines()[0] for told in jobs["refused"])
        assert first == second
        assert first.startswith('ConfigError: timely_freeze.schedule is "gpipe": allowed is "host"; ')


@with_bridge
@pytest.mark.skipif(not available(), reason="transformer-engine is not installed")
@pytest.mark.programs
class TestTransformerEngine(BridgeContract):
    """Weight gradients of Transformer Engine's layers wait in all jobs with a section; "whole" samples tokens too."""

    module = "megatron_bridge_engine_jobs"

    def test_nearly_all_weight_gradients_can_wait(self, jobs: dict[str, list[Told]], folder: Path) -> None:
        assert jobs["whole"][0].error == ""
        report = Report.read(folder / self.report)
        assert min(report.tapped_share.values()) > 0.8


# --- in one process ------------------------------------------------------------------------------------------------


def test_a_wrong_setting_is_one_line_before_anything_starts() -> None:
    from tf_adapters.trainers.bridge import TimelyFreezeCallback

    with pytest.raises(ConfigError, match=r"^timely_freeze.max_freeze_ratio is 2: allowed is [^\n]*$"):
        TimelyFreezeCallback({"max_freeze_ratio": 2})


def test_process_groups_that_megatron_does_not_know_are_refused() -> None:
    from tf_adapters.trainers.bridge import TimelyFreezeCallback

    callback = TimelyFreezeCallback({"enabled": False})
    callback._settings = callback._settings.model_copy(update={"enabled": True})
    configured = types.SimpleNamespace(dist=types.SimpleNamespace(use_decentralized_pg=True))
    context: Any = types.SimpleNamespace(state=types.SimpleNamespace(cfg=configured, train_state=None))
    with pytest.raises(UnsupportedError, match=r"^timely_freeze cannot run here: dist.use_decentralized_pg is True, "):
        callback.on_train_start(context)
