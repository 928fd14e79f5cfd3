"""The examples' trainings behind one interface, for benchmarks that run on every host.

1F1B, 8 microbatches. A training has the same weights and data each time it is built.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shared.files import use_example
from tf_adapters.testing import transformer_engine_on_cpu
from tf_adapters.testing.paired import PairedSettings, Step

HOSTS = {"deepspeed": "DeepSpeed", "megatron-core": "Megatron-Core", "torch": "torch.distributed.pipelining"}
"""By the package of each host, its name."""
ENGINE = "transformer-engine"
"""Megatron-Core with Transformer Engine's layers, on a CPU: its own Python, kernels answered by torch."""
RANKS = 2
_ON_MEGATRON = ("megatron-core", ENGINE)
EXAMPLES = {"deepspeed": "deepspeed_gpt", **dict.fromkeys(_ON_MEGATRON, "megatron_gpt"), "torch": "torch_llama"}


@dataclass(frozen=True)
class Size:
    """A model and its pipeline: ``ranks`` stages of ``layers`` in all, microbatches of ``micro_batch`` rows.

    ``replicas`` of the pipeline are trained by DeepSpeed where the group has that many times as many ranks. With
    ``compiled`` torch's decoder layers are compiled one by one. ``clip`` is the largest norm of all gradients, on
    DeepSpeed with ZeRO 1; 0 does not clip, and None leaves it to the example. ``schedule`` is torch's. ``looped`` is
    the number of a rank's stages: Megatron's model chunks, or those of torch's looped schedules; 0 takes the example's.
    ``in_v`` puts the two stages of each rank into a V, on DeepSpeed and Megatron-Core. With ``weights_by_name`` the
    first weights on Megatron-Core do not depend on where the layers are.
    """

    ranks: int = RANKS
    layers: int = 8
    width: int = 256
    context: int = 64
    micro_batch: int = 4
    microbatches: int = 8
    replicas: int = 1
    compiled: bool = False
    clip: float | None = None
    schedule: str = "1f1b"
    looped: int = 0
    in_v: bool = False
    weights_by_name: bool = False


@dataclass
class Training:
    """One training on this rank.

    Attributes:
        step: a whole training step.
        held_out_loss: the loss on text that is not trained on; equal on all ranks.
        attach: attaches an adapter and returns it.
        detach: takes off the adapter, and whatever else the host alone would not have.
        adapter: what freezes it; None for the host alone.
    """

    step: Step
    held_out_loss: Callable[[], float]
    attach: Callable[[], Any]
    detach: Callable[[], None]
    adapter: Any = None


def setup(host: str) -> None:
    """Join the ranks of a pool; runs first in every rank."""
    logging.getLogger("tf_adapters").setLevel(logging.WARNING)
    use_example(EXAMPLES[host])
    if host == "deepspeed":
        import paired

        paired.setup()
    elif host in _ON_MEGATRON:
        import device

        if host == ENGINE:
            transformer_engine_on_cpu.install()
            _use_engine_layers()
        device.join_ranks()
    else:
        import train

        train.join_ranks()


def _use_engine_layers() -> None:
    """Build the example's model of Transformer Engine's layers, with attention that needs no fused kernel."""
    import model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.enums import AttnBackend

    config_of = model.transformer_config

    def unfused(sizes: Any) -> Any:
        config = config_of(sizes)
        config.attention_backend = AttnBackend.unfused
        return config

    vars(model).update(transformer_config=unfused, layer_spec=get_gpt_layer_with_transformer_engine_spec)


def start(host: str, freezing: PairedSettings, *, alone: bool = False, size: Size = Size()) -> Training:
    """A training on a fresh model, frozen as the settings say, or of the host alone. Called on all ranks at once."""
    build = _megatron if host in _ON_MEGATRON else {"deepspeed": _deepspeed, "torch": _torch}[host]
    training = build(freezing, alone, size)
    if not alone and training.adapter is None:
        training.adapter = training.attach()
    return training


def _deepspeed(freezing: PairedSettings, alone: bool, size: Size) -> Training:
    import deepspeed
    import model
    import paired

    import tf_adapters.deepspeed

    model.PipelineModule = deepspeed.pipe.DualPipeVModule if size.in_v else deepspeed.pipe.PipelineModule
    options = paired.Options(
        **vars(freezing),
        stages=size.ranks,
        width=size.width,
        blocks=size.layers,
        context=size.context,
        microbatches=size.microbatches,
        config="gradient_clipping" if size.clip else "plain",
        gradient_clipping=size.clip,
    )
    engine, adapter = paired.build_engine(options, freezing=not alone)
    return Training(
        step=paired.training_step(engine, options),
        held_out_loss=lambda: paired.held_out_loss(engine, options),
        attach=lambda: tf_adapters.deepspeed.attach(engine),
        detach=lambda: engine.timely_freeze.detach(),
        adapter=adapter,
    )


def _megatron(freezing: PairedSettings, alone: bool, size: Size) -> Training:
    from model import Sizes
    from text import ByteDataset, load_text, split
    from trainer import Trainer

    import tf_adapters.megatron
    from benchmarks.shared.megatron_weights import fill_by_name

    sizes = Sizes(
        pipeline=size.ranks,
        layers=size.layers,
        hidden=size.width,
        context=size.context,
        micro_batch=size.micro_batch,
        microbatches=size.microbatches,
        virtual_pipeline=size.looped or 1,
        in_v=size.in_v,
    )
    trainer = Trainer(sizes)
    for chunk in trainer.chunks if size.weights_by_name else ():
        fill_by_name(chunk, deviation=0.02)
    if size.clip is not None:
        trainer.optimizer.config.clip_grad = size.clip
    train, held_out = (ByteDataset(part, trainer.sizes.context) for part in split(load_text("topics")))
    adapters: list[Any] = []

    def attach() -> Any:
        section = freezing.section()
        adapter = tf_adapters.megatron.attach(
            trainer.chunks, trainer.optimizer, section, num_microbatches=size.microbatches
        )
        adapters.append(adapter)
        return adapter

    def detach() -> None:
        adapters.pop().detach()
        tf_adapters.megatron.revert()

    return Training(
        step=partial(trainer.step, trainer.data(train)),
        held_out_loss=lambda: _of_last_stage(trainer.evaluate(held_out)),
        attach=attach,
        detach=detach,
    )


def _torch(freezing: PairedSettings, alone: bool, size: Size) -> Training:
    import models
    import torch
    from data import Batches, encode
    from layout import Layout
    from pipeline import Trainer
    from text import load_text, split

    import tf_adapters.torch_pipelining

    config = models.new_config(layers=size.layers, width=size.width, heads=4, context=size.context, vocabulary=256)
    layout = Layout(size.schedule, size.ranks, config.num_hidden_layers, size.microbatches, size.looped or 2)
    trainer = Trainer(layout, models.build(config), torch.device("cpu"), lr=1e-3, bf16=False)
    trainer.max_norm = size.clip or None
    for layer in [layer for s in trainer.stages.values() for layer in s.model.layers.values()] if size.compiled else []:
        layer.compile()
    train, held_out = (
        Batches(encode(part), size.context, size.microbatches * size.micro_batch) for part in split(load_text("topics"))
    )
    adapters: list[Any] = []

    def attach() -> Any:
        section = freezing.section()
        adapter = tf_adapters.torch_pipelining.attach(trainer.schedule, section, optimizer=trainer.optimizers)
        adapters.append(adapter)
        return adapter

    return Training(
        step=lambda: trainer.step(train[trainer.finished_steps]),
        held_out_loss=lambda: _of_last_stage(trainer.evaluate(held_out)),
        attach=attach,
        detach=lambda: adapters.pop().detach(),
    )


def _of_last_stage(loss: Any) -> float:
    """A loss that the last stage's rank has, told to all."""
    import torch.distributed as dist

    losses: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, None if loss is None else float(loss))
    return next(loss for loss in reversed(losses) if loss is not None)
