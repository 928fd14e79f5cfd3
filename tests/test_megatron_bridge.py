"""The callback in Megatron-Bridge's own ``pretrain`` on two ranks: freezing, checkpoints, refusals."""

from __future__ import annotations

import json
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_bridge_jobs import FREEZING, SAVED, Job, Outcome, run_jobs

from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.report import Report

with_bridge = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
)
LATER = range(SAVED + 1, 13)

JOBS = {
    "alone": Job(save="alone"),
    "ratio 0": Job(section={**FREEZING, "max_freeze_ratio": 0.0, "output_dir": "ratio_0"}),
    "disabled": Job(section={"enabled": False}, iterations=2),
    "frozen": Job(section={**FREEZING, "output_dir": "frozen"}, save="frozen"),
    "resumed": Job(section={**FREEZING, "output_dir": "resumed"}, load="frozen", checkpoint={"ckpt_step": SAVED}),
    "without us": Job(load="frozen", checkpoint={"ckpt_step": SAVED}),
    "without a state": Job(section={**FREEZING}, load="alone", checkpoint={"ckpt_step": SAVED}),
    "no pipeline": Job(
        section={**FREEZING, "output_dir": "no_pipeline"},
        stages=1,
        ddp={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "evaluated only": Job(section={**FREEZING}, skip_train=True),
    "refused": Job(section={**FREEZING, "schedule": "gpipe"}, iterations=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bridge")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    return dict(zip(JOBS, run_jobs(folder, list(JOBS.values())), strict=True))


def losses_of(ranks: list[Outcome]) -> dict[int, float]:
    assert [rank.error for rank in ranks] == ["", ""]
    return ranks[1].losses


# --- real trainings ------------------------------------------------------------------------------------------------


@with_bridge
@pytest.mark.distributed
class TestTrainings:
    def test_it_freezes_and_leaves_a_report(self, outcomes: dict[str, list[Outcome]], folder: Path) -> None:
        ranks = outcomes["frozen"]
        losses = losses_of(ranks)
        assert list(losses) == list(range(1, 13))
        assert ranks[0].events == ["train", *["evaluation"] * 3, "end", "evaluation"]
        said = ranks[0].said
        assert "enabled: megatron-core" in said
        assert "2 stages x 4 microbatches" in said
        assert "warm-up to step 2, monitoring to 6" in said  # the scheduler's two iterations
        assert "stable freezing" in said
        assert ranks[1].said == ""
        report = Report.read(folder / "frozen" / "timely_freeze" / "report.json")
        assert report.plan is not None
        alone = losses_of(outcomes["alone"])
        assert [losses[step] for step in (1, 2, 3)] == [alone[step] for step in (1, 2, 3)]
        assert losses[12] != alone[12]

    def test_ratio_zero_is_bridge_alone_to_the_bit(self, outcomes: dict[str, list[Outcome]]) -> None:
        assert losses_of(outcomes["ratio 0"]) == losses_of(outcomes["alone"])
        for ours, alone in zip(outcomes["ratio 0"], outcomes["alone"], strict=True):
            assert ours.parameters == alone.parameters

    def test_where_it_is_not_enabled_bridge_trains_alone(self, outcomes: dict[str, list[Outcome]]) -> None:
        alone = losses_of(outcomes["alone"])
        assert losses_of(outcomes["disabled"]) == {step: alone[step] for step in (1, 2)}
        assert "disabled" in outcomes["disabled"][0].said

    def test_a_resumed_run_goes_on_with_the_same_losses(self, outcomes: dict[str, list[Outcome]]) -> None:
        uninterrupted = losses_of(outcomes["frozen"])
        assert losses_of(outcomes["resumed"]) == {step: uninterrupted[step] for step in LATER}
        assert f"resumed after step {SAVED}: " in outcomes["resumed"][0].said
        assert "measured" not in outcomes["resumed"][0].said  # no plan is made again

    def test_its_checkpoint_loads_without_us(self, outcomes: dict[str, list[Outcome]]) -> None:
        assert list(losses_of(outcomes["without us"])) == list(LATER)

    def test_a_checkpoint_without_a_state_begins_freezing_anew(self, outcomes: dict[str, list[Outcome]]) -> None:
        alone = losses_of(outcomes["alone"])
        losses = losses_of(outcomes["without a state"])
        assert list(losses) == list(LATER)
        assert losses[7] == alone[7]  # monitoring changes nothing in its first step
        assert "resumed after step 0: " in outcomes["without a state"][0].said

    def test_every_checkpoint_has_the_state_of_its_own_step(
        self, outcomes: dict[str, list[Outcome]], folder: Path
    ) -> None:
        assert outcomes["frozen"][0].error == ""
        for step in (SAVED, 2 * SAVED):
            saved = torch.load(folder / "frozen" / f"iter_{step:07d}" / "train_state.pt", weights_only=True)
            assert json.loads(bytes(saved["timely_freeze"].tolist()))["completed_steps"] == step
        alone = torch.load(folder / "alone" / f"iter_{SAVED:07d}" / "train_state.pt", weights_only=True)
        assert "timely_freeze" not in alone

    def test_figures_are_in_its_tensorboard(self, outcomes: dict[str, list[Outcome]], folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert outcomes["frozen"][0].error == ""
        events = EventAccumulator(str(folder / "frozen" / "logs"))
        events.Reload()
        assert [event.step for event in events.Scalars("timely-freeze/afr_stage_0")] == list(range(1, 13))
        assert "timely-freeze/planned_step_ms" in events.Tags()["scalars"]

    def test_two_replicas_without_a_pipeline_freeze_too(self, outcomes: dict[str, list[Outcome]]) -> None:
        losses_of(outcomes["no pipeline"])
        assert "1 stages x 2 microbatches" in outcomes["no pipeline"][0].said
        first, second = outcomes["no pipeline"]
        assert first.parameters == second.parameters

    def test_an_evaluation_attaches_nothing(self, outcomes: dict[str, list[Outcome]]) -> None:
        assert losses_of(outcomes["evaluated only"]) == {}
        assert outcomes["evaluated only"][0].said == ""

    def test_what_cannot_be_right_is_the_same_line_on_all_ranks(self, outcomes: dict[str, list[Outcome]]) -> None:
        lines = {rank.error.splitlines()[0] for rank in outcomes["refused"]}
        assert len(lines) == 1
        assert lines.pop().startswith('ConfigError: timely_freeze.schedule is "gpipe": allowed is "host"; ')


# --- in one process ------------------------------------------------------------------------------------------------


def test_a_wrong_setting_is_one_line_before_anything_starts() -> None:
    from tf_adapters.megatron.bridge import TimelyFreezeCallback

    with pytest.raises(ConfigError, match=r"^timely_freeze.max_freeze_ratio is 2: allowed is [^\n]*$"):
        TimelyFreezeCallback({"max_freeze_ratio": 2})


def test_process_groups_that_megatron_does_not_know_are_refused() -> None:
    from tf_adapters.megatron.bridge import TimelyFreezeCallback

    callback = TimelyFreezeCallback({"enabled": False})
    callback._settings = callback._settings.model_copy(update={"enabled": True})
    configured = types.SimpleNamespace(dist=types.SimpleNamespace(use_decentralized_pg=True))
    context: Any = types.SimpleNamespace(state=types.SimpleNamespace(cfg=configured, train_state=None))
    with pytest.raises(UnsupportedError, match=r"^timely_freeze cannot run here: dist.use_decentralized_pg is True, "):
        callback.on_train_start(context)
