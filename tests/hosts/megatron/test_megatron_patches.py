"""Each patch of Megatron: put on, put on once, taken off, refused where the symbol is gone, and true to its callers.

The table below is Megatron's own: parameter lists and call expressions, read with ``ast`` from the sources of each
version (``ast.unparse`` of a function's arguments without annotations, and of every call of that name under
``megatron/``; arguments that are themselves calls are replaced by a name). 0.16.1 to 0.19.2 are the wheels, with
``megatron.training`` of 0.16.1 from the Megatron-LM tag core_v0.16.1; "main" is Megatron-LM's main branch at 0.20.0
(August 2026). Megatron-LM core_v0.19.0 reads like the wheel of 0.19.2.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import megatron_patches
import tf_adapters.megatron
from megatron_patches import (
    arguments,
    backward_step,
    checkpointing,
    communication,
    datasets,
    first_stage,
    forward_backward,
    forward_step,
    layer_layout,
    microbatch_data,
    model_setup,
    parallel_groups,
    reductions,
    tied_embeddings,
    train_state,
    validated_arguments,
)
from megatron_patches.patch import Patch, PatchError, revert_all
from tf_adapters.errors import UnsupportedError
from tf_adapters.megatron import adapter as adapters
from tf_adapters.megatron import entry, tags
from tf_adapters.megatron import schedules as our_schedules
from tf_adapters.megatron.placement import PipelinePosition

CORE = "megatron.core.pipeline_parallel.schedules"
VERSIONS = ("0.16.1", "0.17.1", "0.18.1", "0.19.2", "main")
BEFORE_17, FROM_17 = VERSIONS[:1], VERSIONS[1:]
TO_18, FROM_19 = VERSIONS[:3], VERSIONS[3:]

_BATCH = (
    "*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
    "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
    "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False"
)
_LOAD = "load_dir, args, rank0=False, sharded_state_dict=None, checkpointing_context=None"

PARAMETERS: dict[str, dict[tuple[str, ...], str]] = {
    f"{CORE}.forward_step": {
        VERSIONS: "forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, "
        "config, cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
        "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True",
    },
    f"{CORE}.backward_step": {
        BEFORE_17: "input_tensor, output_tensor, output_tensor_grad, model_type, config",
        FROM_17: "input_tensor, output_tensor, output_tensor_grad, config",
    },
    f"{CORE}.forward_backward_no_pipelining": {VERSIONS: _BATCH},
    f"{CORE}.forward_backward_pipelining_without_interleaving": {VERSIONS: _BATCH},
    f"{CORE}.forward_backward_pipelining_with_interleaving": {VERSIONS: _BATCH},
    f"{CORE}.get_schedule_table": {
        VERSIONS: "num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage",
    },
    f"{CORE}.get_pp_rank_microbatches": {
        VERSIONS: "num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage, forward_only=False, "
        "overlap_moe_expert_parallel_comm=False, p2p_communicator=None",
    },
    "megatron.core.transformer.cuda_graphs.convert_schedule_table_to_order": {
        VERSIONS: "num_warmup_microbatches, num_model_chunks, schedule_table",
    },
    "megatron.training.arguments.add_megatron_arguments": {VERSIONS: "parser"},
    "megatron.training.arguments.validate_args": {VERSIONS: "args, defaults={}"},
    "megatron.training.training.setup_model_and_optimizer": {
        TO_18: "model_provider_func, model_type, checkpointing_context=None",
        FROM_19: "model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, "
        "pg_collection=None",
    },
    "megatron.training.checkpointing.generate_state_dict": {
        VERSIONS: "args, model, optimizer, opt_param_scheduler, rng_state, iteration=None, optim_sd_kwargs=None, "
        "model_sd_kwargs=None, rerun_state=None",
    },
    "megatron.training.checkpointing._load_base_checkpoint": {
        TO_18: _LOAD,
        FROM_19: f"{_LOAD}, dp_cp_group=None, expt_dp_group=None, gpt_compat_layer_maps=None",
    },
}

_LOOP = "megatron.training.training"
PARAMETERS |= {
    f"{_LOOP}.logical_and_across_model_parallel_group": {TO_18: "input", FROM_19: "input, group=None"},
    f"{_LOOP}.reduce_max_stat_across_model_parallel_group": {TO_18: "stat", FROM_19: "stat, group=None"},
}

_FIRST = "forward_step_func, {0}, {1}, num_microbatches, input_tensor, forward_data_store, config"
_OF_1F1B = _FIRST.format("data_iterator", "model")
_OF_CHUNK = _FIRST.format("data_iterator[model_chunk_id]", "model[model_chunk_id]")
_PIPELINED = (
    "cp_group_size=cp_size, collect_non_loss_data=collect_non_loss_data, checkpoint_activations_microbatch="
    "checkpoint_activations_microbatch, is_first_microbatch=is_first_microbatch"
)
_RUN = (
    "(forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, num_microbatches=num_microbatches,"
    " seq_length=seq_length, micro_batch_size=micro_batch_size, decoder_seq_length=decoder_seq_length, "
)
_BATCHES = {
    TO_18: (
        _RUN + "forward_only=False, adjust_tensor_shapes_fn=adjust_tensor_shapes_fn, force_all_reduce=save_wgrads)",
        _RUN + "forward_only=True)",
        _RUN + "forward_only=True, collect_non_loss_data=True)",
    ),
    FROM_19: (
        _RUN + "forward_only=False, adjust_tensor_shapes_fn=adjust_tensor_shapes_fn, force_all_reduce=save_wgrads, "
        "p2p_communicator=p2p_communicator, pg_collection=pg_collection)",
        _RUN + "forward_only=True, adjust_tensor_shapes_fn=adjust_tensor_shapes_fn, pg_collection=pg_collection, "
        "p2p_communicator=p2p_communicator)",
    ),
    VERSIONS: (
        "(forward_step_func=f, data_iterator=d, model=m, num_microbatches=1, seq_length=1, micro_batch_size=1)",
    ),
}

CALLS: dict[str, dict[tuple[str, ...], tuple[str, ...]]] = {
    f"{CORE}.forward_step": {
        VERSIONS: (
            f"({_OF_1F1B}, cp_size, collect_non_loss_data, is_first_microbatch=is_first_microbatch, "
            "current_microbatch=i)",
            f"({_OF_1F1B}, {_PIPELINED}, current_microbatch=i, is_last_stage=is_last_stage)",
            f"({_OF_CHUNK}, {_PIPELINED}, current_microbatch=microbatch_id, vp_stage=model_chunk_id, "
            "is_last_stage=is_last_stage)",
            f"({_OF_1F1B}, cp_size)",
        ),
    },
    f"{CORE}.backward_step": {
        BEFORE_17: (
            "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
            "(input_tensor=input_tensor, output_tensor=output_tensor, output_tensor_grad=output_tensor_grad, "
            "model_type=model_type, config=config)",
        ),
        FROM_17: (
            "(input_tensor, output_tensor, output_tensor_grad, config)",
            "(input_tensor, output_tensor=output_tensor, output_tensor_grad=output_tensor_grad, config=config)",
        ),
    },
    f"{CORE}.forward_backward_no_pipelining": _BATCHES,
    f"{CORE}.forward_backward_pipelining_without_interleaving": _BATCHES,
    f"{CORE}.forward_backward_pipelining_with_interleaving": _BATCHES,
    "megatron.training.arguments.add_megatron_arguments": {VERSIONS: ("(parser)",)},
    "megatron.training.arguments.validate_args": {VERSIONS: ("(args, args_defaults)",)},
    "megatron.training.training.setup_model_and_optimizer": {
        TO_18: ("(model_provider, model_type, checkpointing_context=checkpointing_context)",),
        FROM_19: (
            "(model_type, model_provider_func=model_provider, checkpointing_context=checkpointing_context, "
            "cfg_container=cfg_container, pg_collection=pg_collection)",
        ),
    },
    f"{_LOOP}.logical_and_across_model_parallel_group": {
        TO_18: ("(update_successful)",),
        FROM_19: ("(update_successful, group=mp_group)",),
    },
    f"{_LOOP}.reduce_max_stat_across_model_parallel_group": {
        TO_18: ("(grad_norm)", "(num_zeros_in_grad)", "(learning_rate)"),
        FROM_19: (
            "(grad_norm, group=mp_group)",
            "(num_zeros_in_grad, group=mp_group)",
            "(learning_rate, group=_lr_mp_group)",
        ),
    },
    "megatron.training.checkpointing.generate_state_dict": {
        VERSIONS: (
            "(args, model, optimizer, opt_param_scheduler, rng_state, iteration=iteration, optim_sd_kwargs="
            "optim_sd_kwargs, model_sd_kwargs=model_sd_kwargs, rerun_state=rerun_state)",
            "(args, model, optimizer, opt_param_scheduler, rng_state, optim_sd_kwargs=optim_sd_kwargs, "
            "model_sd_kwargs=model_sd_kwargs, rerun_state=rerun_state)",
            "(args, model=model, optimizer=optimizer, opt_param_scheduler=opt_param_scheduler, rng_state=rng_state, "
            "optim_sd_kwargs=optim_sd_kwargs, rerun_state=rerun_state, iteration=1)",
        ),
    },
    "megatron.training.checkpointing._load_base_checkpoint": {
        VERSIONS: (
            "(load_dir, args, rank0=True, checkpointing_context=checkpointing_context)",
            "(load_dir, args, rank0=False)",
        ),
        TO_18: ("(load_dir, args, rank0=False, checkpointing_context=checkpointing_context, **load_kwargs)",),
        FROM_19: (
            "(load_dir, args, rank0=False, checkpointing_context=checkpointing_context, dp_cp_group=dp_cp_group, "
            "expt_dp_group=expt_dp_group, gpt_compat_layer_maps=gpt_compat_layer_maps, **load_kwargs)",
        ),
    },
}

# What each patch module replaces, and how it is applied so that nothing changes.
UNCHANGED: dict[types.ModuleType, tuple[Callable[[], None], tuple[str, ...]]] = {
    forward_step: (lambda: forward_step.apply(lambda run, model, microbatch: run()), (f"{CORE}.forward_step",)),
    backward_step: (lambda: backward_step.apply(lambda run, output: run()), (f"{CORE}.backward_step",)),
    forward_backward: (
        lambda: forward_backward.apply(lambda run, batch: run()),
        (
            f"{CORE}.forward_backward_no_pipelining",
            f"{CORE}.forward_backward_pipelining_without_interleaving",
            f"{CORE}.forward_backward_pipelining_with_interleaving",
        ),
    ),
    arguments: (lambda: arguments.apply(lambda parser: None), ("megatron.training.arguments.add_megatron_arguments",)),
    validated_arguments: (
        lambda: validated_arguments.apply(lambda args: None),
        ("megatron.training.arguments.validate_args",),
    ),
    model_setup: (
        lambda: model_setup.apply(lambda *results: None),
        ("megatron.training.training.setup_model_and_optimizer",),
    ),
    reductions: (
        lambda: reductions.apply(reductions.MEGATRON_LM, lambda run, own: run(), lambda run, own: run()),
        (
            f"{_LOOP}.logical_and_across_model_parallel_group",
            f"{_LOOP}.reduce_max_stat_across_model_parallel_group",
        ),
    ),
    checkpointing: (
        lambda: checkpointing.apply("key", lambda: None, lambda state: None),
        (
            "megatron.training.checkpointing.generate_state_dict",
            "megatron.training.checkpointing._load_base_checkpoint",
        ),
    ),
}
PATCHED = [(module, path) for module, (_, paths) in UNCHANGED.items() for path in paths]
each_symbol = pytest.mark.parametrize(("patch", "path"), PATCHED, ids=[path.rpartition(".")[2] for _, path in PATCHED])
NEEDED = [(module, path) for module, path in PATCHED if module is not reductions]
each_needed_symbol = pytest.mark.parametrize(
    ("patch", "path"), NEEDED, ids=[path.rpartition(".")[2] for _, path in NEEDED]
)
FUNCTIONS = {path.rpartition(".")[2] for _, path in PATCHED}
each_version = pytest.mark.parametrize("version", VERSIONS)


IN_A_V = (first_stage, parallel_groups, layer_layout, tied_embeddings, microbatch_data, datasets)
"""Applied only for chunks in a V, on the real host (``test_megatron_v``)."""


def apply_unchanged(patch: types.ModuleType) -> None:
    UNCHANGED[patch][0]()


def name_of(path: str) -> str:
    return path.rpartition(".")[2]


def module_of(path: str) -> types.ModuleType:
    return importlib.import_module(path.rpartition(".")[0])


def symbol(path: str) -> Any:
    return getattr(module_of(path), name_of(path))


def of_version(table: dict[tuple[str, ...], Any], version: str) -> list[Any]:
    return [entry for versions, entry in table.items() if version in versions]


def parameters_of(path: str, version: str) -> str:
    (found,) = of_version(PARAMETERS[path], version)
    return found


# --- the host: Megatron's names with Megatron's signatures -----------------------------------------------------


class Values(dict[str, Any]):
    """A value for every name in a call expression, except for the function's; the same name is the same object."""

    def __missing__(self, name: str) -> Any:
        if name in FUNCTIONS:
            raise KeyError(name)  # eval looks it up in the module then
        return self.setdefault(name, f"the {name}")


class Host:
    """Functions of one version of Megatron, in Megatron's modules, that record what they are called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.version = version
        self.received: list[dict[str, Any]] = []
        self.result: Any = ({}, object(), object())
        self.error: Exception | None = None
        self.chunks = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        self.values = Values(
            model=self.chunks,
            data_iterator=["iterator 0", "iterator 1"],
            model_chunk_id=1,
            i=2,
            microbatch_id=3,
            num_microbatches=4,
            load_kwargs={"sharded_state_dict": "sharded"},
        )
        for _, path in PATCHED:
            monkeypatch.setattr(module_of(path), name_of(path), self.function(path))

    def function(self, path: str) -> Callable[..., Any]:
        """A function with the signature that ``path`` has in this version."""
        return function_like(path, self.version, self._record)

    def call(self, path: str, arguments: str) -> Any:
        """Call ``path`` as code of its own module does: by a global name, with these argument expressions."""
        return eval(name_of(path) + arguments, vars(module_of(path)), self.values)

    def calls(self, path: str) -> list[str]:
        return [call for calls in of_version(CALLS[path], self.version) for call in calls]

    def _record(self, received: dict[str, Any]) -> Any:
        self.received.append(received)
        if self.error is not None:
            raise self.error
        return self.result


def function_like(path: str, version: str, body: Callable[[dict[str, Any]], Any]) -> Any:
    """A function with the name and the parameters of ``path``, which gives ``body`` its arguments by name."""
    scope: dict[str, Any] = {"body": body}
    exec(f"def {name_of(path)}({parameters_of(path, version)}):\n    return body(locals())", scope)
    return scope[name_of(path)]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules for ``megatron.training``, which no wheel of 0.16.1 has; every patch is taken back at the end."""
    ours = [path for _, path in PATCHED if path.startswith("megatron.training.")]
    for module in ("megatron.training", *(path.rpartition(".")[0] for path in ours)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for path in ours:
        setattr(module_of(path), name_of(path), function_like(path, VERSIONS[0], lambda received: None))
    yield
    megatron_patches.revert_all()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, version: str) -> Host:
    return Host(monkeypatch, version)


# --- on, once, off ---------------------------------------------------------------------------------------------


@each_symbol
def test_the_symbol_is_replaced_and_the_original_kept(patch: types.ModuleType, path: str) -> None:
    original = symbol(path)
    apply_unchanged(patch)
    assert symbol(path) is not original
    assert symbol(path).__wrapped__ is original
    assert symbol(path).__name__ == original.__name__
    assert inspect.signature(symbol(path)) == inspect.signature(original)


@each_symbol
def test_applying_twice_wraps_once(patch: types.ModuleType, path: str) -> None:
    original = symbol(path)
    apply_unchanged(patch)
    first = symbol(path)
    apply_unchanged(patch)
    assert symbol(path) is first
    assert first.__wrapped__ is original


@each_symbol
def test_reverting_puts_the_same_object_back(patch: types.ModuleType, path: str) -> None:
    original = symbol(path)
    revert_all(patch.PATCHES)
    assert symbol(path) is original
    apply_unchanged(patch)
    revert_all(patch.PATCHES)
    assert symbol(path) is original
    revert_all(patch.PATCHES)
    assert symbol(path) is original


@each_symbol
def test_it_can_be_applied_again_after_reverting(patch: types.ModuleType, path: str) -> None:
    original = symbol(path)
    apply_unchanged(patch)
    revert_all(patch.PATCHES)
    apply_unchanged(patch)
    assert symbol(path) is not original
    assert symbol(path).__wrapped__ is original


@each_symbol
def test_each_patch_replaces_its_own_symbols_only(patch: types.ModuleType, path: str) -> None:
    others = {other: symbol(other) for _, other in PATCHED if other not in UNCHANGED[patch][1]}
    apply_unchanged(patch)
    assert all(symbol(other) is before for other, before in others.items())


def test_all_patches_can_be_taken_back_at_once() -> None:
    originals = {path: symbol(path) for _, path in PATCHED}
    for patch in UNCHANGED:
        apply_unchanged(patch)
    assert all(symbol(path).__wrapped__ is original for path, original in originals.items())
    megatron_patches.revert_all()
    assert all(symbol(path) is original for path, original in originals.items())
    assert {*UNCHANGED, *IN_A_V, communication, train_state} == set(megatron_patches.ALL)


@pytest.mark.parametrize(
    "transfer",
    [
        lambda *, tensor_recv_prev, tensor_recv_next, group: [group],
        lambda **named: [named["group"]],  # ms-swift's own wrapper of them
    ],
)
def test_transfers_tell_what_they_receive(transfer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    for name in ("_batched_p2p_ops", "_p2p_ops"):
        monkeypatch.setattr(p2p, name, transfer)
    seen: list[Any] = []

    def handler(run: Callable[[], Any], previous: Any, following: Any) -> Any:
        seen.append((previous, following))
        return run()

    communication.apply(handler)
    try:
        assert p2p._p2p_ops(tensor_recv_prev=1, tensor_recv_next=None, group=7) == [7]
        assert p2p._batched_p2p_ops(tensor_recv_prev=None, tensor_recv_next=2, group=8) == [8]
    finally:
        revert_all(communication.PATCHES)
    assert seen == [(1, None), (None, 2)]


# --- what is not there -----------------------------------------------------------------------------------------


@each_needed_symbol
def test_a_missing_module_is_named(patch: types.ModuleType, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = path.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)
    check_refusal(lambda: apply_unchanged(patch), f"there is no {module} ")


@each_needed_symbol
@pytest.mark.parametrize("found", ["nothing", "no function"])
def test_a_missing_symbol_is_named_with_its_whole_path(
    patch: types.ModuleType, path: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "nothing":
        monkeypatch.delattr(module_of(path), name_of(path))
    else:
        monkeypatch.setattr(module_of(path), name_of(path), "a text")
    check_refusal(lambda: apply_unchanged(patch), f"this Megatron has no {path}; run `tf-adapters doctor`")


def test_a_loop_without_the_reductions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module_of(f"{_LOOP}.x"), "logical_and_across_model_parallel_group")
    apply_unchanged(reductions)
    assert not reductions.MEGATRON_LM.successful[0].applied
    assert reductions.MEGATRON_LM.largest[0].applied
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    reductions.apply(reductions.BRIDGE, lambda run, own: run(), lambda run, own: run())
    assert not any(patch.applied for patch in reductions.BRIDGE.largest)


@each_needed_symbol
def test_a_patch_that_is_refused_leaves_the_host_as_it_was(
    patch: types.ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module_of(path), name_of(path))
    others = {other: symbol(other) for _, other in PATCHED if other != path}
    with pytest.raises(PatchError):
        apply_unchanged(patch)
    assert [other for other, before in others.items() if symbol(other) is not before] == []


@each_needed_symbol
def test_a_patch_that_was_refused_can_be_applied_when_the_symbol_is_there(
    patch: types.ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = symbol(path)
    with monkeypatch.context() as without:
        without.delattr(module_of(path), name_of(path))
        with pytest.raises(PatchError):
            apply_unchanged(patch)
    apply_unchanged(patch)
    assert symbol(path).__wrapped__ is original


def check_refusal(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(PatchError) as caught:
        call()
    assert text in str(caught.value)
    assert str(caught.value).startswith("timely_freeze cannot run here: ")
    assert "\n" not in str(caught.value)


# --- one Patch -------------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = types.ModuleType("some_host.of_ours")
    made.double = lambda x: 2 * x
    monkeypatch.setitem(sys.modules, "some_host.of_ours", made)
    return made


def one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: original(x) + 1


def test_a_patch_from_on_to_off(module: Any) -> None:
    original = module.double
    patch = Patch("some_host.of_ours", "double")
    assert patch.path == "some_host.of_ours.double"
    assert not patch.applied
    patch.apply(one_more)
    assert patch.applied
    patch.apply(one_more)
    assert module.double(3) == 7
    assert module.double.__wrapped__ is original
    patch.revert()
    patch.revert()
    assert not patch.applied
    assert module.double is original
    patch.apply(one_more)
    assert module.double(3) == 7


def test_a_patch_reaches_whoever_looks_the_symbol_up_in_its_module(module: Any) -> None:
    exec("def quadruple(x): return double(double(x))", vars(module))
    quadruple = module.quadruple
    patch = Patch("some_host.of_ours", "double")
    patch.apply(one_more)
    assert quadruple(1) == 7
    patch.revert()
    assert quadruple(1) == 4


def test_check_returns_the_symbol_and_replaces_nothing(module: Any) -> None:
    patch = Patch("some_host.of_ours", "double")
    assert patch.check() is module.double
    assert not patch.applied
    check_refusal(Patch("some_host.of_ours", "triple").check, "this Megatron has no some_host.of_ours.triple;")
    check_refusal(Patch("some_host.of_theirs", "double").check, "there is no some_host.of_theirs ")


def test_a_method_of_a_class_is_replaced_for_all_its_objects(module: Any) -> None:
    class Host:
        def double(self, x: int) -> int:
            return 2 * x

    module.Host, made, original = Host, Host(), Host.double
    patch = Patch("some_host.of_ours", "Host.double", "x")
    patch.handle(lambda run, x: run() + x)
    assert made.double(3) == made.double(x=3) == 9
    patch.revert()
    assert Host.double is original
    check_refusal(
        Patch("some_host.of_ours", "Host.triple").check, "this Megatron has no some_host.of_ours.Host.triple;"
    )
    check_refusal(Patch("some_host.of_ours", "Guest.double").check, "has no some_host.of_ours.Guest.double;")


def test_a_train_state_is_saved_and_loaded_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class TrainState:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step = state_dict["step"]

    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.state"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules["megatron.bridge.training.state"])["TrainState"] = TrainState
    ours, other = TrainState(), TrainState()
    ours.step = 3
    train_state.apply("key", lambda state: "text" if state is ours else None)
    assert other.state_dict() == {"step": 0}
    assert ours.state_dict() == {"step": 3, "key": "text"}
    other.load_state_dict(ours.state_dict())
    assert (other.step, vars(other)["key"]) == (3, "text")
    other.load_state_dict({"step": 4})
    assert (other.step, vars(other)["key"]) == (4, None)
    revert_all(train_state.PATCHES)
    assert ours.state_dict() == {"step": 3}


def test_a_wrapper_that_fails_leaves_the_symbol_alone(module: Any) -> None:
    original = module.double
    patch = Patch("some_host.of_ours", "double")

    def fail(original: Callable[..., Any]) -> Callable[..., Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        patch.apply(fail)
    assert module.double is original
    assert not patch.applied


# --- calls as Megatron makes them ------------------------------------------------------------------------------


@each_version
@each_symbol
def test_the_host_gets_exactly_its_callers_arguments_and_they_its_result(
    patch: types.ModuleType, path: str, version: str, host: Host
) -> None:
    assert host.calls(path)
    for call in host.calls(path):
        direct = host.call(path, call)
        apply_unchanged(patch)
        through = host.call(path, call)
        revert_all(patch.PATCHES)
        assert through is direct is host.result
        alone, patched = host.received
        assert patched == alone
        host.received.clear()


@each_symbol
@pytest.mark.parametrize("version", ["0.19.2"])
def test_a_wrong_call_is_the_hosts_own_error(patch: types.ModuleType, path: str, version: str, host: Host) -> None:
    apply_unchanged(patch)
    with pytest.raises(TypeError):
        symbol(path)(nonsense=1)
    assert host.received == []


@each_version
@each_symbol
def test_the_hosts_error_passes_through(patch: types.ModuleType, path: str, version: str, host: Host) -> None:
    host.error = MemoryError("the host's")
    apply_unchanged(patch)
    with pytest.raises(MemoryError) as caught:
        host.call(path, host.calls(path)[0])
    assert caught.value is host.error


@each_version
def test_a_forward_is_handled_with_its_model_and_microbatch(version: str, host: Host) -> None:
    seen: list[Any] = []
    forward_step.apply(lambda run, model, microbatch: seen.append((model, microbatch)) or run())
    for call in host.calls(f"{CORE}.forward_step"):
        host.call(f"{CORE}.forward_step", call)
    assert seen == [(each["model"], each["current_microbatch"]) for each in host.received]
    assert seen == [(host.chunks, 2), (host.chunks, 2), (host.chunks[1], 3), (host.chunks, None)]


@each_version
def test_a_backward_is_handled_with_the_forwards_output(version: str, host: Host) -> None:
    seen: list[Any] = []
    backward_step.apply(lambda run, output: seen.append(output) or run())
    for call in host.calls(f"{CORE}.backward_step"):
        host.call(f"{CORE}.backward_step", call)
    assert seen == ["the output_tensor"] * 2
    assert ("model_type" in host.received[0]) == (version == "0.16.1")


@each_version
@pytest.mark.parametrize("path", UNCHANGED[forward_backward][1])
def test_a_batch_is_handled_with_model_microbatches_and_whether_it_only_evaluates(
    path: str, version: str, host: Host
) -> None:
    seen: list[Any] = []
    forward_backward.apply(lambda run, batch: seen.append(tuple(batch)[:4]) or run())
    for call in host.calls(path):
        host.call(path, call)
    names = ("model", "data_iterator", "num_microbatches", "forward_only")
    assert seen == [tuple(each[name] for name in names) for each in host.received]
    assert {forward_only for *_, forward_only in seen} == {False, True}
    assert seen[-1] == ("the m", "the d", 1, False)


@each_version
def test_arguments_are_added_after_megatrons_to_the_same_parser(version: str, host: Host) -> None:
    order: list[Any] = []
    parser = host.result = argparse.ArgumentParser()
    arguments.apply(lambda given: order.append((given, len(host.received))))
    assert host.call("megatron.training.arguments.add_megatron_arguments", "(parser)") is parser
    assert order == [(parser, 1)]


@each_version
def test_what_was_set_up_is_handed_over_once_and_returned(version: str, host: Host) -> None:
    seen: list[Any] = []
    path = "megatron.training.training.setup_model_and_optimizer"
    model_setup.apply(lambda model, optimizer, scheduler: seen.append((model, optimizer, scheduler)))
    (call,) = host.calls(path)
    assert host.call(path, call) is host.result
    assert seen == [host.result]


@each_version
@pytest.mark.parametrize("ours", [{"phase": 1}, None], ids=["something", "nothing"])
def test_a_checkpoint_holds_what_we_have_to_save(ours: Any, version: str, host: Host) -> None:
    path = "megatron.training.checkpointing.generate_state_dict"
    checkpointing.apply("key", lambda: ours, lambda state: None)
    for call in host.calls(path):
        host.result = {"model": 1}
        saved = host.call(path, call)
        assert saved is host.result
        assert saved == ({"model": 1} if ours is None else {"model": 1, "key": ours})


@each_version
def test_what_a_checkpoint_has_is_handed_over_unless_only_its_arguments_are_read(version: str, host: Host) -> None:
    path = "megatron.training.checkpointing._load_base_checkpoint"
    seen: list[Any] = []
    checkpointing.apply("key", lambda: None, seen.append)
    host.result = ({"key": "ours", "model": 1}, "name", False, "type")
    for call in host.calls(path):
        assert host.call(path, call) is host.result
    assert [each["rank0"] for each in host.received] == [True, False, False]
    assert seen == ["ours", "ours"]


@each_version
def test_a_checkpoint_without_our_state_hands_over_none_and_no_checkpoint_hands_over_nothing(
    version: str, host: Host
) -> None:
    seen: list[Any] = []
    checkpointing.apply("key", lambda: None, seen.append)
    host.result = ({"model": 1}, "name", False, "type")
    host.call("megatron.training.checkpointing._load_base_checkpoint", "(load_dir, args)")
    assert seen == [None]
    host.result = (None, "", False, None)
    host.call("megatron.training.checkpointing._load_base_checkpoint", "(load_dir, args)")
    assert seen == [None]


# --- any import order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((1, None), "forward_backward_no_pipelining"),
        ((2, None), "forward_backward_pipelining_without_interleaving"),
        ((2, 2), "forward_backward_pipelining_with_interleaving"),
    ],
)
def test_a_function_that_was_imported_before_still_gives_the_wrapped_schedule(sizes: Any, name: str) -> None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    original = get_forward_backward_func(*sizes)
    assert original is symbol(f"{CORE}.{name}")
    apply_unchanged(forward_backward)
    wrapped = get_forward_backward_func(*sizes)
    assert wrapped is symbol(f"{CORE}.{name}")
    assert wrapped.__wrapped__ is original
    revert_all(forward_backward.PATCHES)
    assert get_forward_backward_func(*sizes) is original


@each_version
@each_symbol
def test_a_caller_that_exists_before_the_patch_goes_through_it(
    patch: types.ModuleType, path: str, version: str, host: Host
) -> None:
    caller = eval(f"lambda: {name_of(path)}", vars(module_of(path)))
    before = caller()
    apply_unchanged(patch)
    assert caller() is symbol(path) is not before


# --- models with and without an adapter ------------------------------------------------------------------------


@each_version
@pytest.mark.parametrize("path", [path for _, path in PATCHED if path.startswith(CORE)])
@pytest.mark.parametrize("output", ["a tensor", "a list", "a dict", "none"])
def test_models_without_an_adapter_run_as_before(path: str, output: str, version: str, host: Host) -> None:
    tensor = torch.zeros(1)
    given: Any = {"a tensor": tensor, "a list": [tensor], "a dict": {"module": tensor}, "none": None}[output]
    host.values["output_tensor"] = given
    call = f"({', '.join(f'{name}={name}' for name in inspect.signature(symbol(path)).parameters)})"
    direct = host.call(path, call)
    entry.patch_schedules()
    assert host.call(path, call) is direct
    alone, patched = host.received
    assert all(patched[key] is alone[key] for key in alone)
    assert tags.tagged(given) is None


class Adapter:
    """Stands in for a MegatronAdapter, and writes down what it is asked to run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def batch(self, batch: Any) -> Adapter:
        self.seen.append(f"batch of {batch.num_microbatches}")
        return self

    def __enter__(self) -> None:
        self.seen.append("begins")

    def __exit__(self, *_: object) -> None:
        self.seen.append("ends")

    def forward(self, run: Callable[[], Any], model: Any, microbatch: int | None) -> Any:
        self.seen.append((model, microbatch))
        return run()

    def backward(self, run: Callable[[], Any], chunk: Any, microbatch: int) -> Any:
        self.seen.append((chunk, microbatch))
        return run()


@pytest.fixture
def adapter(host: Host) -> Adapter:
    made = Adapter()
    for chunk in host.chunks:
        setattr(chunk, adapters.ATTRIBUTE, made)
    return made


@each_version
def test_a_training_batch_runs_inside_the_adapters(version: str, host: Host, adapter: Adapter) -> None:
    entry.patch_schedules()
    path = f"{CORE}.forward_backward_no_pipelining"
    train, *evaluate = host.calls(path)[:-1]
    for call in evaluate:
        assert host.call(path, call) is host.result
    assert adapter.seen == []
    assert host.call(path, train) is host.result
    assert adapter.seen == ["batch of 4", "begins", "ends"]
    assert host.received[-1]["model"] is host.chunks


@each_version
def test_an_adapter_gets_its_chunks_forwards_and_backwards(version: str, host: Host, adapter: Adapter) -> None:
    entry.patch_schedules()
    chunk = host.chunks[1]
    _, _, interleaved, _ = host.calls(f"{CORE}.forward_step")
    assert host.call(f"{CORE}.forward_step", interleaved) is host.result
    for output in (torch.zeros(1), [torch.zeros(1)]):
        tags.tag(output, (adapter, chunk, 3))  # type: ignore[arg-type]
        backward = symbol(f"{CORE}.backward_step")
        given = dict.fromkeys(inspect.signature(backward).parameters, "host's")
        assert backward(**{**given, "output_tensor": output}) is host.result
    assert adapter.seen == [(chunk, 3)] * 3
    assert len(host.received) == 3


def test_a_symbol_that_others_import_by_name_is_replaced_there_too_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first() -> str:
        return "the host's"

    modules = {name: types.ModuleType(name) for name in ("defines", "imports", "keeps", "imports_later")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if name != "imports_later":
            vars(module)["first"] = first
    patch = Patch("defines", "first", everywhere=True, but=("keeps",))
    patch.apply(lambda run: lambda: "ours")
    vars(modules["imports_later"])["first"] = vars(modules["defines"])["first"]
    assert {name: vars(module)["first"]() for name, module in modules.items()} == {
        "defines": "ours",
        "imports": "ours",
        "keeps": "the host's",
        "imports_later": "ours",
    }
    patch.revert()
    assert all(vars(module)["first"] is first for module in modules.values())


# --- a script's patches ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_ins")
def test_installing_twice_gives_the_same_handle_and_either_revert_takes_everything_back() -> None:
    detached: list[bool] = []
    handle = tf_adapters.megatron.install()
    for revert in (handle.revert, tf_adapters.megatron.revert):
        assert tf_adapters.megatron.install() is handle
        assert model_setup.PATCH.applied
        handle.adapter = types.SimpleNamespace(detach=lambda: detached.append(True))  # type: ignore[assignment]
        revert()
        assert handle.adapter is None
        assert not any(patch.applied for patch in megatron_patches.patches())
    assert detached == [True, True]


@pytest.mark.usefixtures("stand_ins")
def test_a_script_gets_errors_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = module_of(model_setup.PATCH.path), name_of(model_setup.PATCH.path)
    with monkeypatch.context() as without:
        without.delattr(module, name)
        with pytest.raises(UnsupportedError, match=f"this Megatron has no {model_setup.PATCH.path}"):
            tf_adapters.megatron.install()
    handle = tf_adapters.megatron.install()
    with monkeypatch.context() as wrapped:
        wrapped.setattr(module, name, lambda: None)
        for revert in (handle.revert, tf_adapters.megatron.revert):
            with pytest.raises(UnsupportedError, match=f"{model_setup.PATCH.path} was replaced by other code"):
                revert()
    handle.revert()


# --- what we call ----------------------------------------------------------------------------------------------


@each_version
def test_megatrons_schedule_tables_are_asked_with_its_own_arguments(
    version: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: dict[str, dict[str, Any]] = {}
    results = {
        "get_pp_rank_microbatches": (8, False, "warm-up", 6),
        "get_schedule_table": "the table",
        "convert_schedule_table_to_order": [1, -2],
    }

    def answering(path: str) -> Callable[..., Any]:
        function, name = host.function(path), name_of(path)

        def answer(*args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            received[name] = host.received.pop()
            return results[name]

        return answer

    for path in [path for path in PARAMETERS if name_of(path) in results]:
        monkeypatch.setattr(our_schedules, name_of(path), answering(path))
    monkeypatch.setattr(our_schedules, "P2PCommunicator", lambda pp_group, config: (pp_group, config))
    config = types.SimpleNamespace(microbatch_group_size_per_vp_stage=3, overlap_p2p_comm=True)
    position = PipelinePosition(rank=1, size=2, chunks=2)
    actions = our_schedules.local_row(position, config, "group", 4).actions
    assert [str(action) for action in actions] == ["1F0", "3B0"]
    assert received == {
        "get_pp_rank_microbatches": {
            "num_microbatches": 4,
            "num_model_chunks": 2,
            "microbatch_group_size_per_vp_stage": 3,
            "forward_only": False,
            "overlap_moe_expert_parallel_comm": False,
            "p2p_communicator": ("group", config),
        },
        "get_schedule_table": {
            "num_microbatches": 4,
            "num_model_chunks": 2,
            "microbatch_group_size_per_vp_stage": 3,
        },
        "convert_schedule_table_to_order": {
            "num_warmup_microbatches": "warm-up",
            "num_model_chunks": 2,
            "schedule_table": "the table",
        },
    }
