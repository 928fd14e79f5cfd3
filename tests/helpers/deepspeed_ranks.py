"""What the ranks of the DeepSpeed tests run: a small tied or untied language model on the real pipeline engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from low_rank import freeze_all_but_adapters
from rank_pools import destroy_groups, seed
from torch import nn

from tf_adapters.testing import force_plan
from tf_adapters.testing.oracle import recorded_draws

VOCABULARY, WIDTH, CONTEXT = 32, 16, 6
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "torch_adam": True},
    },
    "gradient_clipping": 0.0,
    "steps_per_print": 1000000,
}
SECTION: dict[str, Any] = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 2,
    "on_error": "raise",
}
ENGINES: list[Any] = []  # that this process has built since the last teardown


@dataclass(frozen=True)
class Case:
    """One training run: what the JSON config says, the model, and for how long."""

    stages: int = 2  # ranks of the pipeline; DualPipeV has two stages on each
    dualpipev: bool = False
    dynamic_shape: bool = False  # microbatches of several lengths in a batch
    config: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] | None = field(default_factory=dict)
    tied: bool = False
    adapted: range | None = None  # layers that have low-rank adapters: nothing else trains
    compiled: str = ""  # "layers": one by one; "engine": all by ``engine.compile()``, "late": after attach
    steps: int = 6
    numbers: tuple[int, ...] = ()  # of microbatches in the steps in turn, where they change
    ratios: float | dict[str, float] | None = None  # a plan to start with, instead of a measured one
    output_dir: str = "runs/tests"

    def microbatches_in(self, step: int) -> int:
        return self.numbers[step % len(self.numbers)] if self.numbers else self.microbatches

    @property
    def num_stages(self) -> int:
        return self.stages * (2 if self.dualpipev else 1)

    @property
    def microbatches(self) -> int:
        return int(self.ds_config()["gradient_accumulation_steps"])

    def ds_config(self) -> dict[str, Any]:
        config = {**PLAIN, **self.config}
        if self.section is not None:
            config["timely_freeze"] = {**SECTION, "output_dir": self.output_dir, **self.section}
        return config


def setup() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)


def teardown() -> None:
    """Lets go of the engines and their groups."""
    import deepspeed

    torch.distributed.barrier()  # nobody still reads what another rank has sent
    while ENGINES:
        engine = ENGINES.pop()
        for part in (*engine.parameters(), engine.optimizer, engine.grid, engine):  # autograd holds them for ever
            vars(part).clear()
    destroy_groups(deepspeed.comm.destroy_process_group)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def project(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batch(step: int, replica: int, microbatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The microbatches of one step: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    draw = lambda: torch.randint(VOCABULARY, (2, CONTEXT), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(microbatches)]


def build_engine(case: Case) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    seed(7)
    if case.tied:
        first = TiedLayerSpec("embed", Embed)
        last = TiedLayerSpec("embed", Embed, forward_fn=project)
    else:
        first, last = LayerSpec(Embed), LayerSpec(Head)
    module = (deepspeed.pipe.DualPipeVModule if case.dualpipev else PipelineModule)(
        layers=[first, *[LayerSpec(Block) for _ in range(4)], last],
        num_stages=case.stages,
        loss_fn=loss_fn,
        partition_method="uniform",
        seed_layers=True,
        seed_fn=seed,
        checkpointable_layers=["Block"],
        **({"dynamic_shape": True} if case.dynamic_shape else {}),
    )
    if case.adapted is not None:
        numbered = [(name, layer) for name, layer in module.named_children() if name.isdigit()]
        freeze_all_but_adapters(numbered, case.adapted)
        module.tied_modules.requires_grad_(False)
    for layer in module.forward_funcs if case.compiled == "layers" else ():
        layer.compile(fullgraph=True)
    # All of them: an optimizer passes by what has no gradient, and a stage that trains nothing needs one too.
    parameters = list(module.parameters())
    engine = deepspeed.initialize(model=module, model_parameters=parameters, config=case.ds_config())[0]
    if case.compiled == "engine":
        engine.compile()
    ENGINES.append(engine)
    return engine


class Ordinary(nn.Module):
    """The same model in one process. A tied weight is two parameters here, so each stage's share can be masked."""

    def __init__(self, case: Case, state: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.tied, self.dualpipev, self.last_stage = case.tied, case.dualpipev, case.num_stages - 1
        names = ["embed_0" if case.tied else "0", *map(str, range(1, 5)), "embed_last" if case.tied else "5"]
        kinds = [Embed, *[Block] * 4, Embed if case.tied else Head]
        for name, kind in zip(names, kinds, strict=True):
            self.layers[name] = kind()
        if case.adapted is not None:
            blocks = [(name, layer) for name, layer in self.layers.items() if name.isdigit()]
            self.layers.requires_grad_(False)
            freeze_all_but_adapters(blocks, case.adapted)
        for rank, values in enumerate(state):
            for name, value in values.items():
                for stage in self.stages_of(rank, name):
                    self.get_parameter(self.rename(name, stage)).data.copy_(value)

    def stages_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The stages of a rank that hold a parameter; it matters for tied weights, whose places are told apart."""
        return (0, self.last_stage) if self.dualpipev and name.startswith("tied") else (rank,)

    def rename(self, name: str, stage: int) -> str:
        """This model's name for a parameter of a pipeline stage."""
        return "layers." + name.replace("tied_modules.embed", "embed_0" if stage == 0 else "embed_last")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for name, layer in self.layers.items():
            x = project(layer, x) if name == "embed_last" else layer(x)
        return x


def parameters_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class GradientRecorder:
    """The gradients that reach the inner optimizer, by parameter name: whole, or this rank's fragments of them."""

    def __init__(self, engine: Any, controller: Any = None) -> None:
        self.engine, self.controller = engine, controller
        self.latest: dict[str, torch.Tensor] = {}
        self.masks: dict[tuple[int, int], tuple[str, ...]] = {}  # of the step's own number of microbatches
        self._hook = engine.basic_optimizer.register_step_pre_hook(self._record)

    def _record(self, *_: Any) -> None:
        if self.controller is not None:
            step, number = self.controller.step, self.engine.micro_batches
            stages = range(self.controller.schedule.num_stages)
            self.masks = {(s, m): self.controller.frozen_parameters(step, s, m) for s in stages for m in range(number)}
        for name, p in self.engine.module.named_parameters():
            if self.engine.optimizer is self.engine.basic_optimizer:
                self.latest[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            else:
                self._record_fragment(name, p)

    def _record_fragment(self, name: str, p: Any) -> None:
        from tf_adapters.deepspeed.partitions import flat_partitions, fragments

        fragment = fragments(self.engine.optimizer).get(id(p))
        if fragment is None:
            self.latest.setdefault(name, torch.zeros(p.shape))
            return
        flat = flat_partitions(self.engine.optimizer)[fragment.group]
        if flat.grad is None:
            return
        whole = torch.zeros(p.numel())
        part = flat.grad.narrow(0, fragment.start, fragment.numel)
        whole.narrow(0, fragment.begin, fragment.numel).copy_(part)
        self.latest[name] = whole.view(p.shape)


def optimizer_state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter and optimizer state by name, whichever path holds them (this rank's fragments)."""
    from tf_adapters.deepspeed.partitions import flat_partitions, fragments

    found: dict[str, dict[str, torch.Tensor]] = {}
    is_flat = engine.optimizer is not engine.basic_optimizer
    of_rank = fragments(engine.optimizer) if is_flat else {}
    for name, p in engine.module.named_parameters():
        if not is_flat:
            state = engine.basic_optimizer.state.get(p, {})
            found[name] = {"value": p.detach().clone()}
            found[name] |= {k: v.clone() for k, v in state.items() if torch.is_tensor(v)}
        elif id(p) in of_rank:
            at = of_rank[id(p)]
            flat = flat_partitions(engine.optimizer)[at.group]
            tensors = {"value": flat.detach(), **engine.basic_optimizer.state.get(flat, {})}
            found[name] = {
                k: v.narrow(0, at.start, at.numel).clone()
                for k, v in tensors.items()
                if torch.is_tensor(v) and v.shape == flat.shape
            }
    return found


def train(case: Case) -> dict[str, Any]:
    """Train and record, for every step, what the oracle needs."""
    import tf_adapters.deepspeed

    engine = build_engine(case)
    adapter = tf_adapters.deepspeed.attach(engine)
    if case.compiled == "late":
        engine.compile()
    recorder = GradientRecorder(engine, adapter and adapter.controller)
    if adapter is not None and case.ratios is not None:
        force_plan(adapter.controller, case.ratios)
    with recorded_draws() as draws:
        steps = [_step(case, engine, adapter, recorder, step) for step in range(case.steps)]
    result = {
        "stage": engine.stage_id,
        "replica": engine.grid.data_parallel_id,
        "steps": steps,
        "parameters": parameters_of(engine),
        "draws": draws,
    }
    if adapter is not None:
        result["schedule"] = adapter.controller.schedule.to_text()
        result["status"] = adapter.controller.state.failure
        result["numbers"] = sorted(adapter.controller.state.plans.of)
        result["plan"] = adapter.controller.state.plan and adapter.controller.state.plan.to_json()
    return result


def _step(case: Case, engine: Any, adapter: Any, recorder: GradientRecorder, step: int) -> dict[str, Any]:
    before, state_before = parameters_of(engine), optimizer_state(engine)
    phase = adapter and adapter.controller.phase.value
    microbatches = case.microbatches_in(step)
    if case.numbers:
        replicas = engine.grid.get_data_parallel_world_size()
        engine.set_train_batch_size(microbatches * replicas * engine.train_micro_batch_size_per_gpu())
    loss = engine.train_batch(iter(batch(step, engine.grid.data_parallel_id, microbatches)))
    return {
        "loss": float(loss),
        "number": adapter and adapter.controller.step - 1,
        "before": before,
        "gradients": dict(recorder.latest),
        "masks": recorder.masks,
        "phase": phase,
        "state_before": state_before,
        "state_after": optimizer_state(engine),
    }


def batches(steps: range, replica: int, microbatches: int) -> Iterator[Any]:
    for step in steps:
        yield from batch(step, replica, microbatches)
