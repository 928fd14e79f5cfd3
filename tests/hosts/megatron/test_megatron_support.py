"""What Megatron's models and optimizers are refused for before training, in one line, and what is accepted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from torch import nn

import megatron_patches
import tf_adapters.megatron
from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError, TimelyFreezeError, UnsupportedError
from tf_adapters.megatron import entry, support
from tf_adapters.megatron.support import check

PREFIX = "timely_freeze cannot run here: "
COMPILED = (
    "the model or a part of it is compiled with torch.compile, which would recompile for every mask; "
    'compile its layers one by one and take granularity "block", or train without compiling'
)
PLAIN = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4)


class Chunk(nn.Module):
    """A model chunk: it has its config, as Megatron's modules do."""

    def __init__(self, config: Any = PLAIN) -> None:
        super().__init__()
        self.config = config
        self.decoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Wrapped(nn.Module):
    """Float16Module and DistributedDataParallel hold what they wrap as ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def sgd(chunk: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(chunk.parameters(), lr=0.1)


def megatrons(kind: type[MegatronOptimizer], inner: Any) -> Any:
    """One of Megatron's optimizers around ``inner``, without the buffers that it makes on a GPU."""
    made = kind.__new__(kind)
    made.optimizer = inner
    made.config = OptimizerConfig(optimizer="sgd", lr=0.1)
    made.model_param_group_index_map, made.float16_groups = {}, []
    return made


def refusal(chunks: Any = None, optimizer: Any = None, config: Any = PLAIN) -> str:
    chunks = [Chunk(config)] if chunks is None else chunks
    optimizer = sgd(Chunk()) if optimizer is None else optimizer
    with pytest.raises(UnsupportedError) as caught:
        check(chunks, optimizer)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(PREFIX)
    return str(caught.value).removeprefix(PREFIX)


# --- the model's config ----------------------------------------------------------------------------------------

UNEVEN = "it makes microbatches of different lengths, but a plan assumes equal times for all microbatches of a stage"
GRAPH = "a CUDA graph would replay one mask for ever"
APART = "weight gradients are computed apart from the backward that is masked"
DELAYED = f'{APART}; set it to False, and weight_gradients to "deferred" here'
REMATERIALIZED = "the weight gradient of one layer finishes that of another, which a frozen weight would leave undone"
FURTHER_TOKENS = "multi-token prediction was checked"
REFUSED: dict[str, tuple[Any, Any, str]] = {  # what is refused, what is not, and why
    "cuda_graph_impl": ("local", "none", GRAPH),
    "enable_cuda_graph": (True, False, GRAPH),
    "external_cuda_graph": (True, False, GRAPH),
    "delay_wgrad_compute": (True, False, DELAYED),
    "overlap_moe_expert_parallel_comm": (True, False, "the combined 1F1B schedule mixes two microbatches in one pass"),
    "hybrid_context_parallel": (True, False, "its schedule runs its own forwards and backwards"),
    "defer_embedding_wgrad_compute": (True, False, APART),
    "overlap_dispatch_backward_with_experts_wgrad": (
        True,
        False,
        "weight gradients are computed apart from the backward",
    ),
    "moe_paged_stash": (True, False, "it counts activations that a frozen layer does not store"),
    "fine_grained_activation_offloading": (True, False, "it counts activations that a frozen layer does not store"),
    "mtp_standalone": (True, False, f"{FURTHER_TOKENS} on the last stage only"),
    "mtp_use_repeated_layer": (True, False, f"{FURTHER_TOKENS} with a layer for each depth only"),
    "mtp_detach_heads": (True, False, f"{FURTHER_TOKENS} with a loss that trains all of the model only"),
    "mtp_hsm": (True, False, f"{FURTHER_TOKENS} with a layer for each depth only"),
    "gtp_weight_remat_size": (2, 1, REMATERIALIZED),
    "expert_gtp_weight_remat_size": (4, 1, REMATERIALIZED),
    "sequence_packing_scheduler": ("dp_balanced", None, UNEVEN),
    "dynamic_context_parallel": (True, False, UNEVEN),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_setting_that_freezing_cannot_be_right_with_is_refused(field: str) -> None:
    wrong, _, why = REFUSED[field]
    assert refusal(config=SimpleNamespace(**{field: wrong})) == f"{field} is {wrong!r}, and {why}"


def test_what_megatron_needs_for_delayed_weight_gradients_hides_no_advice() -> None:
    both = SimpleNamespace(delay_wgrad_compute=True, overlap_moe_expert_parallel_comm=True)
    assert refusal(config=both) == f"delay_wgrad_compute is True, and {DELAYED}"


def test_a_backward_that_is_not_megatrons_keeps_its_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    run = schedules.backward_step
    chunk, deferred = Chunk(), TimelyFreezeConfig.parse({"weight_gradients": "deferred"})
    check([chunk], sgd(chunk), deferred)

    @functools.wraps(run)  # it looks like Megatron's
    def clipped(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    monkeypatch.setattr(schedules, "backward_step", clipped)
    with pytest.raises(UnsupportedError) as caught:
        check([chunk], sgd(chunk), deferred)
    assert str(caught.value) == (
        f"{PREFIX}Megatron's backward_step was replaced by test_megatron_support, which may use each microbatch's "
        'whole gradient; use weight_gradients "in_place"'
    )
    check([chunk], sgd(chunk), TimelyFreezeConfig.parse({"weight_gradients": "in_place"}))


@pytest.mark.parametrize("field", REFUSED)
def test_the_same_setting_switched_off_is_accepted(field: str) -> None:
    _, right, _ = REFUSED[field]
    check([Chunk(SimpleNamespace(**{field: right}))], sgd(Chunk()))


def test_every_refused_setting_is_tested_here() -> None:
    assert [field for field, *_ in support._REFUSED] == list(REFUSED)


@pytest.mark.parametrize("field", REFUSED)
def test_every_refused_setting_is_one_that_megatron_has(field: str) -> None:
    """A misspelt one would be looked for in vain. All versions from 0.16.1 to 0.20.0 have them, but for these."""
    from_0_18 = ("overlap_dispatch_backward_with_experts_wgrad", "moe_paged_stash")
    from_0_19 = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    of_dev = ("sequence_packing_scheduler", "dynamic_context_parallel", "mtp_detach_heads", "mtp_hsm")
    later = (*from_0_18, *from_0_19, *of_dev, "mtp_use_repeated_layer")
    assert field in TransformerConfig.__dataclass_fields__ or field in later


def test_an_option_that_megatron_has_renamed_is_noticed() -> None:
    assert support.missing_options(PLAIN) == []
    renamed = SimpleNamespace(**{name: value for name, value in vars(PLAIN).items() if name != "delay_wgrad_compute"})
    assert support.missing_options(renamed) == ["delay_wgrad_compute"]


@pytest.mark.parametrize(("version", "noticed"), [("0.17.1", False), ("0.18.0rc2", True), ("0.20.0", True)])
def test_an_option_of_a_later_version_is_missed_from_then_on(
    version: str, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support.metadata, "version", lambda _: version)
    assert ("moe_paged_stash" in support.missing_options(PLAIN)) is noticed


@pytest.mark.parametrize("graph", ["transformer_engine", "full_iteration"])
def test_every_kind_of_cuda_graph_is_refused(graph: str) -> None:
    assert refusal(config=SimpleNamespace(cuda_graph_impl=graph)) == f"cuda_graph_impl is {graph!r}, and {GRAPH}"


OVERLAPPED = (
    "tp_comm_overlap with tp_comm_bulk_wgrad reduces input gradients while weight gradients are computed, and those of "
    "frozen weights are not; set tp_comm_bulk_wgrad to False"
)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"tp_comm_overlap": False}, False),
        ({"tp_comm_overlap": True}, True),  # tp_comm_bulk_wgrad is on by default
        ({"tp_comm_overlap": True, "tp_comm_bulk_wgrad": False}, False),
        ({"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True}, False),
        ({"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True}, True),
        ({"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_fc1": True}, True),
        ({"tp_comm_overlap": True, "tp_comm_bulk_wgrad": False, "tp_comm_overlap_disable_fc1": True}, False),
    ],
    ids=str,
)
def test_input_gradients_that_are_reduced_with_weight_gradients_are_refused(settings: Any, refused: bool) -> None:
    """Transformer Engine then hands an unreduced input gradient on below a frozen weight."""
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=2, sequence_parallel=True
    )
    for field, value in settings.items():
        assert hasattr(config, field)
        setattr(config, field, value)
    if refused:
        assert refusal(config=config) == OVERLAPPED
    else:
        check([Chunk(config)], sgd(Chunk()))


@pytest.mark.parametrize("settings", [{"weight_gradients": "deferred"}, {"granularity": "token"}], ids=str)
def test_further_tokens_are_refused_with_weight_gradients_apart_from_their_backward(settings: Any) -> None:
    config = SimpleNamespace(mtp_num_layers=1)
    with pytest.raises(UnsupportedError, match="the output layer computes several times in a microbatch"):
        check([Chunk(config)], sgd(Chunk()), TimelyFreezeConfig(**settings))
    check([Chunk(config)], sgd(Chunk()), TimelyFreezeConfig(goal="paper"))


# --- the model -------------------------------------------------------------------------------------------------


class FullyShardedDataParallel(Wrapped):
    """Bears the name of Megatron's own, which needs a GPU."""


class TorchFullyShardedDataParallel(Wrapped):
    """Bears the name of Megatron's wrapper of torch's."""


def compiled_chunk() -> nn.Module:
    chunk = Chunk()
    chunk.compile()
    return chunk


def chunk_with_a_compiled_layer() -> nn.Module:
    chunk = Chunk()
    chunk.decoder[1].compile()
    return chunk


def chunk_with_an_optimized_module() -> nn.Module:
    chunk = Chunk()
    compiled: Any = torch.compile(chunk.decoder[1])
    if compiled is chunk.decoder[1]:
        pytest.skip("torch.compile is switched off here (TORCHDYNAMO_DISABLE)")
    chunk.decoder[1] = compiled
    return chunk


@pytest.mark.parametrize("build", [compiled_chunk, chunk_with_a_compiled_layer, chunk_with_an_optimized_module])
@pytest.mark.parametrize("place", ["alone", "wrapped", "second"])
def test_compiled_modules_are_refused_wherever_they_are(build: Any, place: str) -> None:
    chunk = build()
    chunks = {"alone": [chunk], "wrapped": [Wrapped(Wrapped(chunk))], "second": [Chunk(), chunk]}[place]
    assert refusal(chunks=chunks) == COMPILED


@pytest.mark.parametrize("wrapper", [FullyShardedDataParallel, TorchFullyShardedDataParallel])
def test_fully_sharded_models_are_refused(wrapper: Any) -> None:
    text = f"the model is wrapped in {wrapper.__name__}; use Megatron's DistributedDataParallel"
    assert refusal(chunks=[wrapper(Chunk())]) == text
    assert refusal(chunks=[Chunk(), wrapper(Wrapped(Chunk()))]) == text


@pytest.mark.parametrize("chunk", ["text", None, {"decoder": nn.Linear(2, 2)}, [nn.Linear(2, 2)]], ids=str)
def test_a_chunk_that_is_no_module_is_refused(chunk: Any) -> None:
    text = f"a model chunk is a {type(chunk).__name__}; it needs the list of modules that the schedule gets"
    assert refusal(chunks=[chunk]) == text
    assert refusal(chunks=[Chunk(), chunk]) == text


# --- the optimizer ---------------------------------------------------------------------------------------------


class HybridDeviceOptimizer(torch.optim.SGD):
    """Bears the name of Megatron's offload to the CPU."""


class LayerWiseOptimizer(MegatronOptimizer):
    """A kind that we do not know."""


LayerWiseOptimizer.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class NoTorchOptimizer:
    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self) -> None: ...


OFFLOADED = "the optimizer's offload to the CPU (optimizer_cpu_offload) is not supported"
OURS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def test_offload_to_the_cpu_is_refused_wherever_it_is() -> None:
    offloaded = HybridDeviceOptimizer(Chunk().parameters(), lr=0.1)
    inside = megatrons(FP32Optimizer, offloaded)
    assert refusal(optimizer=offloaded) == OFFLOADED
    assert refusal(optimizer=inside) == OFFLOADED
    assert refusal(optimizer=chained(megatrons(FP32Optimizer, sgd(Chunk())), inside)) == OFFLOADED


@pytest.mark.parametrize("kind", OURS)
def test_a_cuda_graph_of_the_optimizer_is_refused(kind: Any) -> None:
    """A setting of OptimizerConfig from 0.19 on."""
    graphed = megatrons(kind, sgd(Chunk()))
    graphed.config.optimizer_cuda_graph = True
    text = "optimizer_cuda_graph is True, and a CUDA graph would update frozen parameters too"
    assert refusal(optimizer=graphed) == text
    assert refusal(optimizer=chained(graphed)) == text


def test_an_optimizer_of_megatron_that_we_do_not_know_is_refused() -> None:
    text = "the optimizer LayerWiseOptimizer is not supported; use Megatron's FP32, float16 or distributed one"
    unknown = megatrons(LayerWiseOptimizer, sgd(Chunk()))
    assert refusal(optimizer=unknown) == text
    assert refusal(optimizer=chained(megatrons(FP32Optimizer, sgd(Chunk())), unknown)) == text


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_that_is_none_of_torch_or_megatron_is_refused(inside: bool) -> None:
    own: Any = NoTorchOptimizer()
    if inside:
        text = "the optimizer NoTorchOptimizer is no torch.optim.Optimizer"
        assert refusal(optimizer=megatrons(FP32Optimizer, own)) == text
    else:
        assert refusal(optimizer=own).startswith("the optimizer NoTorchOptimizer is ")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none")
@pytest.mark.parametrize("kind", OURS)
def test_muon_is_refused_wherever_it_is(kind: Any) -> None:
    text = "the optimizer Muon mixes all rows of an update, frozen ones too; use Adam or SGD"
    muon = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert refusal(optimizer=muon) == text
    assert refusal(optimizer=chained(megatrons(kind, sgd(Chunk())), megatrons(kind, muon))) == text


def test_no_optimizer_at_all_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=f"^{PREFIX}the optimizer"):
        check([Chunk()], None)


def chained(*optimizers: Any) -> ChainedOptimizer:
    return ChainedOptimizer(list(optimizers))


# --- what is accepted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_a_plain_model_with_a_plain_torch_optimizer_is_accepted(name: str) -> None:
    chunk = Chunk()
    check([chunk], getattr(torch.optim, name)(chunk.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", OURS)
def test_megatrons_optimizers_are_accepted_alone_and_chained(kind: Any) -> None:
    chunks = [Wrapped(Wrapped(Chunk())), Wrapped(Wrapped(Chunk()))]
    check(chunks, megatrons(kind, sgd(chunks[0])))
    check(chunks, chained(megatrons(kind, sgd(chunks[0])), megatrons(kind, sgd(chunks[1]))))


@pytest.mark.parametrize("kind", OURS)
def test_a_rank_whose_part_of_the_optimizer_is_empty_is_accepted(kind: Any) -> None:
    """Expert parallelism leaves stubs without parameters on some ranks."""
    check([Chunk()], chained(megatrons(kind, sgd(Chunk())), megatrons(kind, None)))
    check([Chunk()], chained())


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "add_bias_linear": False},
        {"gradient_accumulation_fusion": True},
        {"mtp_num_layers": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_is_supported_is_accepted(settings: dict[str, Any]) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **settings)
    check([Chunk(config)], sgd(Chunk()))


# --- attaching: settings ---------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank without a process group."""
    monkeypatch.setattr(entry, "ProcessGroupCollectives", Collectives)
    yield
    megatron_patches.revert_all()


def attach(config: Any = None, chunks: Any = None, **given: Any) -> Any:
    chunk = Chunk()
    chunks = [chunk] if chunks is None else chunks
    return tf_adapters.megatron.attach(chunks, given.pop("optimizer", sgd(chunk)), config, **given)


def attach_refusal(error: type[TimelyFreezeError], *given: Any, **named: Any) -> str:
    with pytest.raises(error) as caught:
        attach(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_schedule_cannot_be_chosen(schedule: str) -> None:
    assert attach_refusal(ConfigError, {"schedule": schedule}) == (
        f'timely_freeze.schedule is "{schedule}": allowed is "host"; with Megatron-Core the schedule follows from '
        "the pipeline's sizes"
    )


@pytest.mark.usefixtures("alone")
def test_a_wrong_setting_is_refused() -> None:
    text = "timely_freeze.max_freeze_ratio is 1.5: allowed is a number from 0 to 1"
    assert attach_refusal(ConfigError, {"max_freeze_ratio": 1.5}) == text


@pytest.mark.usefixtures("alone")
def test_without_a_number_of_microbatches_attaching_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    assert attach_refusal(ConfigError) == (
        "num_microbatches is None, and Megatron's num_microbatches_calculator is not initialized: "
        "pass the number of microbatches of a batch, an integer of at least 1"
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("given", "used"), [(None, 6), (3, 3)])
def test_the_number_of_microbatches_is_that_of_the_run_unless_given(
    given: int | None, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calculator = SimpleNamespace(get=lambda: 6)
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 1)
    made: list[tuple[Any, ...]] = []

    def adapter(*arguments: Any, **_: Any) -> Any:
        made.append(arguments)
        return SimpleNamespace(controller=SimpleNamespace(announce_start=lambda: None), put_in=lambda: None)

    monkeypatch.setattr(entry, "MegatronAdapter", adapter)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    assert attach(num_microbatches=given, pp_group=group) is not None
    ((model, *_),) = made
    assert (model.config, model.num_microbatches, model.pp_group) == (PLAIN, used, group)


@pytest.mark.usefixtures("alone")
def test_disabled_is_nothing_attached_nothing_patched_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.pipeline_parallel import schedules

    before = dict(vars(schedules))
    chunk = Chunk(SimpleNamespace(enable_cuda_graph=True))  # which would be refused
    with caplog.at_level(logging.INFO, "tf_adapters"):
        assert attach({"enabled": False, "schedule": "gpipe"}, [chunk]) is None
    assert [record.getMessage() for record in caplog.records] == ['timely_freeze: disabled: "enabled" is false']
    assert dict(vars(schedules)) == before
    assert vars(chunk).keys() == vars(Chunk()).keys()


# --- attaching: what is refused leaves everything as it was ----------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("single", [False, True], ids=["list", "module"])
def test_what_is_refused_leaves_model_optimizer_and_megatron_as_they_were(single: bool) -> None:
    from megatron.core.pipeline_parallel import schedules

    chunk = Chunk(SimpleNamespace(delay_wgrad_compute=True))
    optimizer = sgd(chunk)
    before = dict(vars(schedules)), dict(vars(chunk)), dict(vars(optimizer))
    text = attach_refusal(UnsupportedError, chunks=chunk if single else [chunk], optimizer=optimizer)
    assert text == f"{PREFIX}delay_wgrad_compute is True, and {DELAYED}"
    assert (dict(vars(schedules)), dict(vars(chunk)), dict(vars(optimizer))) == before


@pytest.mark.usefixtures("alone")
def test_a_missing_number_of_microbatches_leaves_megatron_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    before = dict(vars(schedules))
    attach_refusal(ConfigError)
    assert [name for name, value in before.items() if vars(schedules)[name] is not value] == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("chunks", [["text"], [None], [[nn.Linear(2, 2)]], []], ids=str)
def test_attaching_to_what_is_no_model_is_refused_in_one_line(chunks: Any) -> None:
    attach_refusal(UnsupportedError, chunks=chunks, optimizer=sgd(Chunk()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer", [None, NoTorchOptimizer()], ids=["none", "neither torch's nor Megatron's"])
def test_attaching_with_what_is_no_optimizer_is_refused_in_one_line(optimizer: Any) -> None:
    attach_refusal(UnsupportedError, optimizer=optimizer)
