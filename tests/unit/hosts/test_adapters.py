"""What hosts share and what reading found wrong in them: checks that need no second process."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.patch import PatchError
from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.hosts.adapter import HostAdapter, attach_once
from tf_adapters.hosts.launcher import run_script
from tf_adapters.hosts.units import UnitRules, units_of
from tf_adapters.schedule.ir import PipelineSchedule
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.pipeline import HostInfo, HostPipeline

HOST = HostInfo("toy", "1")
SCHEDULE = PipelineSchedule.from_text([["0F0", "0B0"]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(500, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class ToyAdapter(HostAdapter):
    """A host of one model in one process, which hangs on the model as Megatron's does."""

    def __init__(self, model: Model, config: TimelyFreezeConfig) -> None:
        self.model = model
        super().__init__(config, Collectives(), self._describe)

    def _describe(self) -> HostPipeline:
        parameters = {0: dict(self.model.named_parameters())}
        return HostPipeline(HOST, SCHEDULE, {0: units_of(self.model)}, parameters)

    def install(self) -> None:
        self.overrides.set(self.model, "timely_freeze", self)


def attach(model: Model, folder: Path, **settings: Any) -> ToyAdapter:
    config = TimelyFreezeConfig(goal="paper", output_dir=str(folder), **settings)
    adapter = attach_once(
        Collectives,
        HOST,
        existing=vars(model).get("timely_freeze"),
        given=config,
        check=lambda settings: None,
        make=lambda _, agreed: ToyAdapter(model, agreed),
    )
    assert adapter is not None
    return adapter


# --- one base for all adapters -------------------------------------------------------------------------------


def test_attaching_again_with_other_settings_is_refused(tmp_path: Path) -> None:
    model = Model()
    first = attach(model, tmp_path, seed=1)
    assert attach(model, tmp_path, seed=1) is first
    with pytest.raises(ConfigError, match="attached already, with other settings: detach"):
        attach(model, tmp_path, seed=2)


def test_a_parameter_that_two_stages_of_a_rank_share_cannot_have_a_mean_of_its_own(tmp_path: Path) -> None:
    class Shared(ToyAdapter):
        def _describe(self) -> HostPipeline:
            parameters = dict(self.model.named_parameters())
            units = units_of(self.model)
            both = PipelineSchedule.from_text([["0F0", "1F0", "1B0", "0B0"]])
            return HostPipeline(HOST, both, {0: units, 1: units}, {0: parameters, 1: parameters})

    with pytest.raises(ConfigError, match=r'gradient_scale is "computed_mean".*stages 0 and 1.*embedding\.weight'):
        Shared(Model(), TimelyFreezeConfig(goal="paper", output_dir=str(tmp_path), gradient_scale="computed_mean"))
    Shared(Model(), TimelyFreezeConfig(goal="paper", output_dir=str(tmp_path)))


def test_leaving_the_context_detaches(tmp_path: Path) -> None:
    model = Model()
    with attach(model, tmp_path):
        assert "timely_freeze" in vars(model)
    assert "timely_freeze" not in vars(model)


def test_detaching_is_refused_where_others_have_wrapped_ours(tmp_path: Path) -> None:
    model = Model()
    adapter = attach(model, tmp_path)
    model.timely_freeze = "theirs"
    with pytest.raises(UnsupportedError, match=r"Model\.timely_freeze was replaced by other code"):
        adapter.detach()
    assert model.timely_freeze == "theirs"


def test_a_state_goes_through_a_checkpoint(tmp_path: Path) -> None:
    adapter = attach(Model(), tmp_path)
    adapter.controller.state.completed_steps = 7
    again = attach(Model(), tmp_path)
    again.load_state_dict(adapter.state_dict())
    assert again.controller.state.completed_steps == 7
    again.load_state_dict({})
    assert again.controller.state.completed_steps == 0


def test_a_copy_of_the_model_takes_no_adapter_along(tmp_path: Path) -> None:
    model = Model()
    attach(model, tmp_path)
    averaged = copy.deepcopy(model)
    assert vars(averaged).get("timely_freeze") is None
    assert torch.equal(averaged.embedding.weight, model.embedding.weight)


# --- units ---------------------------------------------------------------------------------------------------


def test_a_large_table_does_not_spoil_what_a_draw_saves() -> None:
    """GPT-2's vocabulary counted as full work made a draw at 0.5 save 0.51 +- 0.45 of the work."""
    masks = StageMasks({0: units_of(Model())}, seed=0)
    linear = {f"layers.{index}.weight" for index in range(4)}
    for step in range(50):
        assert len(linear & set(masks.draw(step, 0, [0.5])[0].names)) == 2


def test_a_table_that_is_multiplied_by_is_work_of_a_whole_matrix() -> None:
    rules = UnitRules(projects=lambda name, parameter: name == "embedding.weight")
    work = {unit.names[0]: unit.work for unit in units_of(Model(), rules)}
    assert work["embedding.weight"] == 500 * 8
    assert {unit.names[0]: unit.work for unit in units_of(Model())}["embedding.weight"] == 8


# --- torch.distributed.pipelining ----------------------------------------------------------------------------


def test_an_enabled_grad_scaler_is_refused_and_a_disabled_one_is_not() -> None:
    from tf_adapters.torch_pipelining.support import refuse_grad_scaler

    gc.collect()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    refuse_grad_scaler()
    enabled = torch.amp.GradScaler("cpu")
    with pytest.raises(UnsupportedError, match="GradScaler is enabled"):
        refuse_grad_scaler()
    del disabled, enabled
    gc.collect()


# --- Megatron-Core -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of layers as Megatron has them: its input comes by name, and it can recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def _checkpointed_forward(self) -> None: ...

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.linear, hidden_states, use_reentrant=True)


class Multimodal(nn.Module):
    """LLaVA's shape: the embedding is not at the top, and an image encoder has one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.embedding = Embedding()
        self.language_model.decoder = Block()
        self.vision_model = nn.Module()
        self.vision_model.conv = nn.Linear(3, 4)
        self.vision_model.decoder = Block()

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        words = self.language_model.decoder(hidden_states=self.language_model.embedding(tokens))
        return words.sum() + self.vision_model.decoder(hidden_states=self.vision_model.conv(image)).sum()


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens)


def test_recomputed_blocks_behind_any_frozen_embedding_get_their_gradients() -> None:
    from tf_adapters.megatron.chunks import Chunk

    model = Multimodal()
    chunk = Chunk(0, model)
    chunk.hook(SimpleNamespace(recompute_granularity="full"))
    for frozen in (model.language_model.embedding, model.vision_model.conv):
        frozen.requires_grad_(False)
    model(torch.tensor([1, 2]), torch.ones(2, 3)).backward()
    assert model.language_model.decoder.linear.weight.grad is not None
    assert model.vision_model.decoder.linear.weight.grad is not None
    chunk.close()


def test_a_copy_of_a_hooked_chunk_takes_nothing_of_ours_along() -> None:
    from tf_adapters.megatron.chunks import Chunk

    model = Multimodal()
    chunk = Chunk(0, model)
    chunk.hook(SimpleNamespace(recompute_granularity="full"))
    averaged = copy.deepcopy(model)
    (hook,) = averaged.language_model.embedding._forward_hooks.values()
    assert hook.__self__ is chunk


def test_stability_reads_the_fp32_master_of_a_precision_aware_optimizer() -> None:
    from tf_adapters.megatron.optimizers import held_values

    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    read = held_values(optimizer, {0: {"weight": parameter}})
    assert read(0, "weight")[0].values is parameter
    optimizer.state[parameter]["master_param"] = torch.full((3,), 1.0001)
    assert read(0, "weight")[0].values.dtype is torch.float32


def test_muon_is_refused() -> None:
    from tf_adapters.megatron.support import check

    class TensorParallelMuon(torch.optim.SGD): ...

    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="TensorParallelMuon mixes all rows"):
        check([model], TensorParallelMuon(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", ["ddp.param_to_bucket_group", "config.overlap_grad_reduce", "group.finish_param_sync"])
def test_a_renamed_private_name_of_megatrons_ddp_is_refused(name: str) -> None:
    from megatron.core.distributed import DistributedDataParallel

    from tf_adapters.megatron import support

    ddp: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = nn.Linear(2, 2)
    group = SimpleNamespace(**dict.fromkeys(support.BUCKET_GROUP_NAMES))
    config = SimpleNamespace(**dict.fromkeys(support.DDP_CONFIG_NAMES))
    for known in support.DDP_NAMES:
        setattr(ddp, known, {"parameter": group} if known == "param_to_bucket_group" else config)
    assert support.missing_ddp_name(ddp) is None
    owner, _, private = name.partition(".")
    delattr({"ddp": ddp, "config": config, "group": group}[owner], private)
    with pytest.raises(UnsupportedError, match=f"this version of the host has no .*{private}; run `tf-adapters doctor"):
        support.check([ddp], torch.optim.SGD(ddp.parameters(), lr=0.1))


def test_a_half_parameter_without_its_main_copy_is_refused() -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from tf_adapters.megatron.support import missing_optimizer_name

    optimizer = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    parameter = nn.Parameter(torch.ones(2))
    optimizer.float16_groups = [[parameter]]
    assert "has no Parameter.main_param;" in str(missing_optimizer_name(optimizer))
    parameter.main_param = parameter.detach().float()
    assert missing_optimizer_name(optimizer) is None


def test_a_renamed_argument_is_one_line_and_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    import megatron_patches
    from tf_adapters.megatron.entry import patch_schedules

    megatron_patches.revert_all()

    def renamed(other: Any, model: Any) -> None: ...

    monkeypatch.setattr(schedules, "backward_step", renamed)
    before = schedules.forward_step
    with pytest.raises(UnsupportedError, match="backward_step has no argument output_tensor"):
        patch_schedules()
    assert schedules.forward_step is before


def test_a_patch_that_others_have_wrapped_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    import megatron_patches
    from tf_adapters.megatron.entry import patch_schedules

    megatron_patches.revert_all()
    patch_schedules()
    ours = schedules.forward_step
    with monkeypatch.context() as patched:
        patched.setattr(schedules, "forward_step", lambda *_: None)
        with pytest.raises(PatchError, match="forward_step was replaced by other code"):
            megatron_patches.revert_all()
    assert schedules.forward_step is ours
    megatron_patches.revert_all()


# --- DeepSpeed -----------------------------------------------------------------------------------------------


def test_a_renamed_part_of_deepspeeds_flat_partitions_is_refused() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from tf_adapters.deepspeed.support import ZERO_NAMES, missing_partition_name

    outer = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    vars(outer).update(dict.fromkeys(ZERO_NAMES))
    assert missing_partition_name(outer) is None
    del outer.parallel_partitioned_bit16_groups
    assert "has no DeepSpeedZeroOptimizer.parallel_partitioned_bit16_groups;" in str(missing_partition_name(outer))


# --- launchers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_error_of_ours_is_one_line_of_rank_0_and_exit_status_2(
    tmp_path: Path, rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from tf_adapters.config import TimelyFreezeConfig\nTimelyFreezeConfig(max_freze_ratio=0.5)\n")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(SystemExit) as caught:
        run_script("tf_adapters.deepspeed", str(script), [])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all('did you mean "max_freeze_ratio"?' in line for line in said)
