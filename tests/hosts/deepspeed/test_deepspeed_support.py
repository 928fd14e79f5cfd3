"""What DeepSpeed's engine is refused for, what attaching does and leaves alone, and the schedules as we read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed_ranks
import pytest
import torch
from deepspeed.runtime.pipe import schedule as host
from deepspeed_ranks import Block, Case, Embed, Head, build_engine, loss_fn
from logged import Lines
from rank_pools import fork_ranks
from schedules import gpipe, one_f_one_b
from torch import nn

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.deepspeed.schedules import GPipeSchedule, MicrobatchTracker, translate
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.testing import RankPool

distributed = pytest.mark.distributed
PREFIX = "timely_freeze cannot run here: "


# --- engines that are refused --------------------------------------------------------------------------------


class NoTorchOptimizer:
    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def step(self) -> None: ...


class OnebitAdam(torch.optim.SGD):
    """Bears the name of an optimizer that DeepSpeed cannot build on CPU."""


class MuonWithAuxAdam(torch.optim.SGD):
    """Bears the name of an optimizer whose kernels take minutes to compile on CPU."""


class AdamW8bit(torch.optim.SGD):
    """Bears the name of an optimizer of bitsandbytes and of torchao."""


FLAT: dict[str, Any] = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        width = deepspeed_ranks.WIDTH
        self.moe = MoE(hidden_size=width, expert=nn.Linear(width, width), num_experts=2, ep_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def pipeline(kind: Any = None, blocks: Any = Block, **shape: Any) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(Embed), *[LayerSpec(blocks) for _ in range(4)], LayerSpec(Head)]
    shape = shape or {"num_stages": 2}
    return (kind or PipelineModule)(layers=layers, loss_fn=loss_fn, partition_method="uniform", **shape)


def initialize(module: Any = None, optimizer: Any = None, config: dict[str, Any] | None = None) -> Any:
    import deepspeed

    settings = Case(config=config or {}).ds_config()
    if optimizer is not None or settings["optimizer"] is None:
        del settings["optimizer"]
    module = module or pipeline()
    parameters = list(module.parameters())
    return deepspeed.initialize(model=module, model_parameters=parameters, optimizer=optimizer, config=settings)[0]


def plain_engine() -> Any:
    return initialize(nn.Linear(2, 2))


def engine_with_model_parallelism() -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return initialize(pipeline(topology=PipeModelDataParallelTopology(1, 2, 1)))


def dualpipev_on_one_rank() -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    return initialize(pipeline(DualPipeVModule, num_stages=1))


def compiled_engine() -> Any:
    engine = initialize()
    engine.compile()
    return engine


def engine_with_a_compiled_backward() -> Any:
    engine = initialize()
    engine.compile(compiled_autograd_enabled=True)
    return engine


def engine_with_deepcompile() -> Any:
    engine = initialize()
    engine.compile()
    engine.is_deepcompile_enabled = lambda: True  # it needs a device
    return engine


def engine_with_compiled_layers() -> Any:
    module = pipeline()
    for layer in module.children():
        layer.compile()
    return initialize(module)


def engine_with_an_optimized_module() -> Any:
    engine = initialize()
    for name, layer in list(engine.module.named_children()):
        setattr(engine.module, name, torch.compile(layer))
    return engine


def engine_with_experts() -> Any:
    return initialize(pipeline(blocks=Experts))


def engine_with_offload() -> Any:
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    return initialize(config={"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False})


def engine_without_optimizer() -> Any:
    return initialize(config={"optimizer": None})


def engine_with_no_torch_optimizer() -> Any:
    return initialize(optimizer=NoTorchOptimizer)


def engine_with_onebit_adam() -> Any:
    return initialize(optimizer=lambda parameters: OnebitAdam(parameters, lr=0.1))


def engine_with_muon() -> Any:
    return initialize(optimizer=lambda parameters: MuonWithAuxAdam(parameters, lr=0.1))


def fp16_engine() -> Any:
    """A stand-in: the CPU has no fp16."""
    engine = initialize()
    engine.fp16_enabled = lambda: True
    return engine


def engine_with_fp16_autocast() -> Any:
    """The engine makes a GradScaler, which warns and does nothing on a CPU."""
    return initialize_under_fp16_autocast()


def engine_with_fp16_autocast_and_zero() -> Any:
    return initialize_under_fp16_autocast(zero_optimization={"stage": 1})


def initialize_under_fp16_autocast(**config: Any) -> Any:
    """DeepSpeed keeps the setting in a global: later engines of the same process would have it, too."""
    from deepspeed.runtime import torch_autocast

    engine = initialize(config={"torch_autocast": {"enabled": True, "dtype": "float16"}, **config})
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    return engine


def engine_with_scaled_moments() -> Any:
    """A stand-in: the real ones need CUDA."""
    return initialize(optimizer=lambda p: AdamW8bit(p, lr=0.1), config=FLAT)


def engine_with_moments_of_8_bits() -> Any:
    """A stand-in for one of bitsandbytes."""
    engine = initialize(config=FLAT)
    engine.basic_optimizer.args = SimpleNamespace(optim_bits=8)
    return engine


def engine_with_moments_of_16_bits() -> Any:
    """A stand-in for Transformer Engine's FusedAdam."""
    engine = initialize(config=FLAT)
    engine.basic_optimizer.exp_avg_dtype, engine.basic_optimizer.exp_avg_sq_dtype = torch.bfloat16, torch.float16
    return engine


def apex_engine() -> Any:
    """A stand-in: Apex needs CUDA, and a DeepSpeed before 0.19.8."""
    engine = initialize()
    engine.amp_enabled = lambda: True
    return engine


def engine_with_another_wrapper() -> Any:
    """A stand-in: the wrappers that we do not know belong to fp16."""

    class FP16Optimizer:
        param_groups: tuple[Any, ...] = ()

    engine = initialize()
    engine.optimizer = FP16Optimizer()
    return engine


def engine_without_a_symbol() -> Any:
    """A stand-in for another version of DeepSpeed."""
    from tf_adapters.deepspeed import support

    support.ENGINE_NAMES = (*support.ENGINE_NAMES, "_gone")  # type: ignore[assignment]
    return initialize()


COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)
FP16_AUTOCAST = (
    "torch_autocast in fp16 is not supported: each stage scales the loss by itself and skips updates alone; "
    'use "dtype": "bfloat16"'
)
SCALED = (
    "scales its moments by blocks, and a block of a flat partition is frozen in part only; "
    "use fp32 or bf16 moments, or ZeRO stage 0 in fp32"
)
REFUSED = {
    engine_with_model_parallelism: "model parallelism of size 2 inside pipeline stages is not supported",
    dualpipev_on_one_rank: (
        "DualPipeV on one pipeline rank is not supported; use two or more, or the default pipeline engine"
    ),
    compiled_engine: COMPILED,
    engine_with_compiled_layers: COMPILED,
    engine_with_an_optimized_module: COMPILED,
    engine_with_offload: "ZeRO's optimizer offload is not supported; remove zero_optimization.offload_optimizer",
    engine_without_optimizer: (
        'the engine has no optimizer; name one in the config ("optimizer") or pass one to deepspeed.initialize'
    ),
    engine_with_no_torch_optimizer: "the optimizer NoTorchOptimizer is no torch.optim.Optimizer",
    engine_with_onebit_adam: ("the optimizer OnebitAdam is not supported; use Adam, AdamW, SGD or another plain one"),
    engine_with_muon: ("the optimizer MuonWithAuxAdam is not supported; use Adam, AdamW, SGD or another plain one"),
    fp16_engine: "fp16 is not supported; use bf16 or fp32",
    engine_with_fp16_autocast: FP16_AUTOCAST,
    engine_with_fp16_autocast_and_zero: FP16_AUTOCAST,
    engine_with_scaled_moments: f"the optimizer AdamW8bit {SCALED}",
    engine_with_moments_of_8_bits: f"the optimizer AdamW {SCALED}",
    engine_with_moments_of_16_bits: f"the optimizer AdamW {SCALED}",
    apex_engine: 'mixed precision by NVIDIA Apex ("amp") is not supported; use bf16 or fp32',
    engine_with_another_wrapper: (
        "the optimizer wrapper FP16Optimizer is not supported; use ZeRO stage 0 or 1, fp32 or bf16"
    ),
}


def attach_to(build: Any) -> tuple[str, str, bool]:
    """Attach to an engine: what came of it, and whether the engine is as it was."""
    import tf_adapters.deepspeed

    engine = build()
    before = dict(vars(engine))
    try:
        tf_adapters.deepspeed.attach(engine)
    except Exception as error:
        return type(error).__name__, str(error), same(vars(engine), before)
    return "attached", "", same(vars(engine), before)


def same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


def on_rank(rank: int, text: str) -> str:
    return f"rank {rank}: {PREFIX}{text}"


@distributed
@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_an_engine_is_refused_with_the_same_line_on_all_ranks(pools: Any, build: Any) -> None:
    if build is dualpipev_on_one_rank:
        pytest.importorskip("deepspeed.runtime.pipe.dualpipev")
    refusal = ("UnsupportedError", PREFIX + REFUSED[build], True)
    assert pools(2).run(attach_to, build) == [refusal] * 2
    assert "\n" not in refusal[1]


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[RankPool]:
    """Processes for engines that leave process-wide state behind or do not build after another one."""
    with fork_ranks(2, deepspeed_ranks.setup) as started:
        yield started


@distributed
def test_an_engine_that_is_no_pipeline_is_refused(fresh_pool: RankPool) -> None:
    text = (
        f"{PREFIX}the engine is a DeepSpeedEngine; it needs a PipelineEngine, which deepspeed.initialize returns "
        "for a PipelineModule"
    )
    assert fresh_pool.run(attach_to, plain_engine) == [("UnsupportedError", text, True)] * 2


@distributed
def test_mixture_of_experts_is_refused(fresh_pool: RankPool) -> None:
    text = PREFIX + "mixture-of-experts layers are not supported with DeepSpeed's pipeline"
    assert fresh_pool.run(attach_to, engine_with_experts) == [("UnsupportedError", text, True)] * 2


@distributed
def test_another_version_of_deepspeed_is_refused_by_the_symbol_that_it_lacks(fresh_pool: RankPool) -> None:
    text = f"{PREFIX}this version of the host has no PipelineEngine._gone; run `tf-adapters doctor` for those that work"
    assert fresh_pool.run(attach_to, engine_without_a_symbol) == [("UnsupportedError", text, True)] * 2


def compiled_on_the_last_rank() -> Any:
    engine = initialize()
    if engine.stage_id == 1:
        next(engine.module.children()).compile()
    return engine


@distributed
def test_what_is_wrong_on_one_rank_only_is_raised_on_all(pools: Any) -> None:
    refusal = ("UnsupportedError", on_rank(1, COMPILED), True)
    assert pools(2).run(attach_to, compiled_on_the_last_rank) == [refusal] * 2


def attach_exact(build: Callable[[], Any]) -> str:
    import tf_adapters.deepspeed

    try:
        tf_adapters.deepspeed.attach(build(), {"goal": "exact"}).detach()
    except UnsupportedError as error:
        return str(error)
    return "attached"


@distributed
def test_exact_runs_take_compiled_layers_but_not_a_compiled_backward(pools: Any) -> None:
    whole = "engine.compile was called with compiled_autograd_enabled=True, which compiles the whole backward"
    assert pools(2).run(attach_exact, engine_with_compiled_layers) == ["attached"] * 2
    assert pools(2).run(attach_exact, engine_with_a_compiled_backward) == [PREFIX + whole] * 2
    reduces = "DeepCompile reduces gradients inside compiled graphs; leave it off"
    assert pools(2).run(attach_exact, engine_with_deepcompile) == [PREFIX + reduces] * 2


@distributed
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_plain_optimizers_are_accepted(pools: Any, optimizer: str) -> None:
    assert [kind for kind, *_ in pools(2).run(attach_with, optimizer)] == ["attached"] * 2


def attach_with(optimizer: str) -> tuple[str, str, bool]:
    return attach_to(lambda: initialize(optimizer=lambda ps: getattr(torch.optim, optimizer)(ps, lr=0.1)))


# --- attaching -----------------------------------------------------------------------------------------------


def attached_without(section: dict[str, Any] | None) -> tuple[bool, bool, list[str]]:
    import tf_adapters.deepspeed

    engine = build_engine(Case(section=section))
    before = dict(vars(engine))
    with Lines() as lines:
        adapter = tf_adapters.deepspeed.attach(engine)
    return adapter is None, same(vars(engine), before), lines.seen


@distributed
@pytest.mark.parametrize(
    ("section", "reason"),
    [(None, 'the config has no "timely_freeze" section'), ({"enabled": False}, '"enabled" is false')],
)
def test_what_is_not_asked_for_attaches_nothing_and_says_so_once(pools: Any, section: Any, reason: str) -> None:
    first, second = pools(2).run(attached_without, section)
    assert first == (True, True, [f"timely_freeze: disabled: {reason}"])
    assert second == (True, True, [])


@distributed
def test_an_engine_that_would_be_refused_may_train_with_freezing_disabled(pools: Any) -> None:
    assert pools(2).run(disabled_on_a_compiled_engine) == [True, True]


def disabled_on_a_compiled_engine() -> bool:
    import tf_adapters.deepspeed

    return tf_adapters.deepspeed.attach(engine_with_compiled_layers(), {"enabled": False}) is None


@distributed
def test_attaching_twice_gives_the_first_adapter_and_refuses_other_settings(pools: Any) -> None:
    (same_adapter, lines), (also_same, _) = pools(2).run(attached_twice)
    assert same_adapter
    assert also_same
    assert len(lines) == 1
    assert lines[0].startswith("timely_freeze: enabled: deepspeed ")


def attached_twice() -> tuple[bool, list[str]]:
    import tf_adapters.deepspeed

    engine = build_engine(Case())
    with Lines() as lines:
        adapter = tf_adapters.deepspeed.attach(engine)
        again = tf_adapters.deepspeed.attach(engine)
        with pytest.raises(ConfigError, match="attached already, with other settings"):
            tf_adapters.deepspeed.attach(engine, {"max_freeze_ratio": 0.1})
    return adapter is again is engine.timely_freeze and adapter.controller.config.max_freeze_ratio == 0.8, lines.seen


@distributed
@pytest.mark.parametrize("config", [{"max_freeze_ratio": 0.5}, TimelyFreezeConfig(max_freeze_ratio=0.5)])
@pytest.mark.parametrize("section", [None, {"max_freeze_ratio": 0.3}, {"enabled": False}])
def test_settings_given_in_python_are_the_ones_that_count(pools: Any, config: Any, section: Any) -> None:
    assert pools(2).run(ratio_in_force, section, config) == [0.5, 0.5]


def ratio_in_force(section: dict[str, Any] | None, config: Any) -> float:
    import tf_adapters.deepspeed

    engine = build_engine(Case(section=section))
    return tf_adapters.deepspeed.attach(engine, config).controller.config.max_freeze_ratio


@distributed
def test_detaching_leaves_the_engine_as_it_was_and_lets_it_be_attached_again(pools: Any) -> None:
    assert pools(2).run(attached_again) == [(True, True)] * 2


def attached_again() -> tuple[bool, bool]:
    import tf_adapters.deepspeed

    engine = build_engine(Case())
    before, module_before = dict(vars(engine)), dict(vars(engine.module))
    adapter = tf_adapters.deepspeed.attach(engine)
    adapter.detach()
    restored = same(vars(engine), before) and same(vars(engine.module), module_before)
    return restored, tf_adapters.deepspeed.attach(engine) is not adapter


@distributed
def test_initialize_returns_what_deepspeed_returns(pools: Any) -> None:
    assert pools(2).run(initialized_by_us) == [(4, True)] * 2


def initialized_by_us() -> tuple[int, bool]:
    import tf_adapters.deepspeed

    module = pipeline()
    result = tf_adapters.deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=Case().ds_config()
    )
    return len(result), result[0].timely_freeze.controller.config.monitoring_steps == 2


@distributed
@pytest.mark.parametrize(("config", "warned"), [({}, 1), ({"zero_optimization": {"stage": 1}}, 0)], ids=["0", "1"])
def test_clipping_that_deepspeed_gets_wrong_by_itself_is_said_once(pools: Any, config: Any, warned: int) -> None:
    first, second = pools(2).run(lines_on_attaching, {**config, "gradient_clipping": 1.0})
    assert sum("gradient_clipping is 1 with ZeRO stage 0 in fp32" in line for line in first) == warned
    assert second == []


def lines_on_attaching(config: dict[str, Any]) -> list[str]:
    import tf_adapters.deepspeed

    engine = build_engine(Case(config=config))
    with Lines() as lines:
        tf_adapters.deepspeed.attach(engine)
    return lines.seen


# --- wrong settings ------------------------------------------------------------------------------------------


def attach_by_rank(*settings: Any) -> tuple[str, str]:
    import tf_adapters.deepspeed

    engine = build_engine(Case(section=None))
    try:
        adapter = tf_adapters.deepspeed.attach(engine, settings[engine.global_rank])
    except Exception as error:
        return type(error).__name__, str(error)
    return "attached" if adapter else "disabled", ""


WRONG = "timely_freeze.max_freeze_ratio is 1.5: allowed is a number from 0 to 1"


@distributed
def test_a_wrong_setting_is_one_line_on_all_ranks(pools: Any) -> None:
    wrong = {"max_freeze_ratio": 1.5}
    assert pools(2).run(attach_by_rank, wrong, wrong) == [("ConfigError", WRONG)] * 2


@distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_setting_that_is_wrong_on_one_rank_is_an_error_on_all(pools: Any, rank: int) -> None:
    settings: list[Any] = [{}, {}]
    settings[rank] = {"max_freeze_ratio": 1.5}
    assert pools(2).run(attach_by_rank, *settings) == [("ConfigError", f"rank {rank}: {WRONG}")] * 2


@distributed
@pytest.mark.parametrize(
    ("first", "second"),
    [({"seed": 1}, {"seed": 2}), ({"monitoring_steps": 4}, {}), ({}, {"enabled": False}), (None, {})],
    ids=["seed", "length", "enabled", "section"],
)
def test_settings_that_differ_between_ranks_are_an_error_on_all(pools: Any, first: Any, second: Any) -> None:
    """Ranks would disagree about masks, or wait for one another for ever."""
    outcomes = pools(2).run(attach_by_rank, first, second, timeout_s=30.0)
    assert outcomes[0] == outcomes[1]
    kind, text = outcomes[0]
    assert kind == "ConfigError"
    assert "\n" not in text


@distributed
def test_a_misspelt_section_is_an_error_on_all(pools: Any) -> None:
    text = 'unknown section "timely_freze" in the config: did you mean "timely_freeze"?'
    assert [o[:2] for o in pools(2).run(attach_to, misspelt_engine)] == [("ConfigError", text)] * 2


def misspelt_engine() -> Any:
    return initialize(config={"timely_freze": {}})


@distributed
def test_a_schedule_setting_is_refused_with_dualpipev(pools: Any) -> None:
    pytest.importorskip("deepspeed.runtime.pipe.dualpipev")
    text = 'timely_freeze.schedule is "gpipe": allowed is "host"; DeepSpeed\'s DualPipeV engine runs its own'
    assert pools(2).run(attach_dualpipev_with_gpipe) == [("ConfigError", text)] * 2


def attach_dualpipev_with_gpipe() -> tuple[str, str]:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    import tf_adapters.deepspeed
    from tf_adapters.errors import ConfigError

    engine = initialize(pipeline(DualPipeVModule))
    with pytest.raises(ConfigError) as refused:
        tf_adapters.deepspeed.attach(engine, {"schedule": "gpipe"})
    return type(refused.value).__name__, str(refused.value)


def test_dualpipev_translates_to_two_stages_on_each_rank() -> None:
    if not hasattr(host, "DualPipeVSchedule"):
        pytest.skip("this DeepSpeed has no DualPipeV engine")
    assert [" ".join(rank) for rank in translate(host.DualPipeVSchedule, 4, 2).to_text()] == [
        "0F0 0F1 0F2 3F0 3B0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3",
    ]


# --- schedules -----------------------------------------------------------------------------------------------

SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 11)]
TYPES = [host.TrainSchedule, GPipeSchedule]


def rows(schedule_type: Any, stages: int, microbatches: int) -> list[str]:
    """Each stage's actions without its own number: ``F0 F1 B0``."""
    return [" ".join(text[1:] for text in rank) for rank in translate(schedule_type, microbatches, stages).to_text()]


def test_1f1b_of_two_stages() -> None:
    assert rows(host.TrainSchedule, 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_1f1b_of_four_stages() -> None:
    assert rows(host.TrainSchedule, 4, 6) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_gpipe_of_two_and_of_four_stages() -> None:
    assert rows(GPipeSchedule, 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert rows(GPipeSchedule, 4, 6) == ["F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"] * 4


def test_one_stage_alone() -> None:
    assert rows(host.TrainSchedule, 1, 3) == ["F0 B0 F1 B1 F2 B2"]
    assert rows(GPipeSchedule, 1, 3) == ["F0 F1 F2 B0 B1 B2"]


@pytest.mark.parametrize("schedule_type", TYPES)
def test_every_size_translates_to_a_schedule_that_can_run(schedule_type: Any) -> None:
    expected = one_f_one_b if schedule_type is host.TrainSchedule else gpipe
    for stages, microbatches in SIZES:
        translated = translate(schedule_type, microbatches, stages)
        assert translated.validate() == expected(stages, microbatches), (stages, microbatches)


@pytest.mark.parametrize("schedule_type", TYPES)
def test_every_send_meets_its_receive(schedule_type: Any) -> None:
    """Even where a send waits for its receive, as it may with large tensors."""
    for stages, microbatches in SIZES:
        exchanged = exchange(schedule_type, stages, microbatches)
        assert exchanged == 2 * (stages - 1) * microbatches, (stages, microbatches)


_PARTNER = {host.SendActivation: (+1, host.RecvActivation), host.SendGrad: (-1, host.RecvGrad)}


def exchange(schedule_type: Any, stages: int, microbatches: int) -> int:
    """Run the streams with sends that wait for their receive; how many met. Each carries its microbatch."""
    streams = [communication(schedule_type, stage, stages, microbatches) for stage in range(stages)]
    met = 0
    progress = True
    while progress:
        progress = False
        for stage, stream in enumerate(streams):
            if not stream or stream[0][0] not in _PARTNER:
                continue
            kind, microbatch = stream[0]
            step, receive = _PARTNER[kind]
            other = streams[stage + step]
            if other and other[0] == (receive, microbatch):
                del stream[0], other[0]
                met, progress = met + 1, True
    assert not any(streams), f"stuck: {streams}"
    return met


def communication(schedule_type: Any, stage: int, stages: int, microbatches: int) -> list[tuple[type, int]]:
    """A stage's sends and receives in order, with the microbatch that the buffer holds by then."""
    found: list[tuple[type, int]] = []
    in_buffer: dict[int, int] = {}
    received = 0
    for instructions in schedule_type(micro_batches=microbatches, stages=stages, stage_id=stage).steps():
        for instruction in instructions:
            kind = type(instruction)
            if kind is host.RecvActivation or (kind is host.LoadMicroBatch and stage == 0):
                in_buffer[instruction.buffer_id] = received
                received += 1
            if kind in (host.SendActivation, host.RecvActivation, host.SendGrad, host.RecvGrad):
                found.append((kind, in_buffer[instruction.buffer_id]))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gpipe_keeps_a_buffer_for_each_microbatch_and_updates_once_at_the_end(stage: int) -> None:
    schedule = GPipeSchedule(micro_batches=4, stages=3, stage_id=stage)
    steps = list(schedule.steps())
    flat = [instruction for step in steps for instruction in step]
    forwards = [i.buffer_id for i in flat if type(i) is host.ForwardPass]
    assert forwards == [0, 1, 2, 3]
    assert schedule.num_pipe_buffers() == 4
    assert [type(i) for i in flat[-3:]] == [host.ReduceTiedGrads, host.ReduceGrads, host.OptimizerStep]
    assert sum(type(i) is host.OptimizerStep for i in flat) == 1
    loads = [i.buffer_id for i in flat if type(i) is host.LoadMicroBatch]
    assert loads == ([] if stage == 1 else [0, 1, 2, 3])


def test_the_tracker_follows_buffers_that_are_used_again() -> None:
    tracker = MicrobatchTracker()
    assert [tracker.forward(buffer) for buffer in (0, 1)] == [0, 1]
    assert tracker.backward(0) == 0
    assert tracker.forward(0) == 2
    assert [tracker.backward(buffer) for buffer in (1, 0)] == [1, 2]
