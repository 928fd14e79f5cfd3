"""What the ranks of the torch tests run: a small language model on torch.distributed.pipelining's own schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from low_rank import freeze_all_but_adapters
from rank_pools import destroy_groups, rank_pool, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

from tf_adapters import testing
from tf_adapters.testing.oracle import recorded_draws

VOCABULARY, WIDTH, CONTEXT, BLOCKS, ROWS = 32, 12, 5, 8, 2
SECTION: dict[str, Any] = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 2,
    "on_error": "raise",
}
Plan = float | dict[str, float]  # a ratio for all backwards, or by "stage" or "stage.microbatch"
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = (
    *SINGLE,
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    *V_SHAPED,
)
pool = functools.partial(rank_pool, "torch")


@dataclass(frozen=True)
class Case:
    """One training run."""

    schedule: str = "Schedule1F1B"
    ranks: int = 2  # of one pipeline
    microbatches: int = 4  # V-shaped schedules need twice the ranks
    section: dict[str, Any] | None = field(default_factory=dict)  # None: the host alone
    ratios: Plan | tuple[Plan, ...] | None = None  # plans in force, in turn, instead of a measured one
    steps: int = 3
    batches: int = 1  # schedule.step() calls for each update
    deferred: bool = False  # FSDP reduces gradients in the last of these only: finalize_gradients, torch 2.15
    split: bool = False  # the microbatches are given one by one: arg_mbs and target_mbs, torch 2.14
    replicas: str = ""  # of the other half of four ranks: "ddp", "fsdp", "replicate" or "tp", and a variant of it
    adapted: range | None = None  # layers that have low-rank adapters: nothing else trains
    optimizer: str = "AdamW"
    set_to_none: bool = True
    checkpoint: bool = False
    compiled: bool = False  # each layer, by inductor
    wrapped: bool = False  # each layer, by inductor, in a wrapper of torch.compile: as in TorchTitan
    traced: bool = False  # the stages are cut from the whole model by torch's tracer: pipeline(), build_stage()
    dtype: torch.dtype = torch.float32  # of the parameters
    give_optimizer: bool = True
    evaluate: bool = False  # before each batch
    csv: str = ""  # a file that the schedule is loaded from
    output_dir: str = "runs/tests"
    recorded: bool = True  # keep what the oracle needs of every step
    state: bool = False  # and the optimizer's state before and after it

    @property
    def stages(self) -> int:
        return self.ranks * (1 if self.schedule in SINGLE else 2)

    @property
    def scale_grads(self) -> bool:
        return self.batches == 1  # the host divides what earlier batches have accumulated again

    def settings(self) -> dict[str, Any] | None:
        return None if self.section is None else {**SECTION, "output_dir": self.output_dir, **self.section}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Layers(nn.Module):
    """Layers ``first`` to ``last`` of the model, named alike in every cut: the whole of it, or one stage."""

    def __init__(
        self, first: int = 0, last: int = BLOCKS + 1, checkpoint: bool = False, adapted: range | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): _layer(index) for index in range(first, last + 1)})
        if adapted is not None:
            freeze_all_but_adapters(self.layers.items(), adapted)
        self.checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return x


def _layer(index: int) -> nn.Module:
    seed(index)
    if index == 0:
        return nn.Embedding(VOCABULARY, WIDTH)
    return Block() if index <= BLOCKS else nn.Linear(WIDTH, VOCABULARY)


def stage_layers(stage: int, stages: int) -> tuple[int, int]:
    """First and last layer of a stage: the blocks in equal shares, the embedding first and the head last."""
    share = BLOCKS // stages
    first, last = 1 + stage * share, (stage + 1) * share
    return first - (stage == 0), last + (stage == stages - 1)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(case: Case, step: int, replica: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a whole batch: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + number)
    draw = lambda: torch.randint(VOCABULARY, (ROWS * case.microbatches, CONTEXT), generator=generator)  # noqa: E731
    return draw(), draw()


@dataclass
class Run:
    """One rank's part of a run."""

    case: Case
    schedule: Any
    stages: list[Any]
    optimizers: list[torch.optim.Optimizer]
    replica: int
    adapter: Any = None

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return {plain(n): p for stage in self.stages for n, p in stage.submod.named_parameters()}

    def force_plan(self, step: int) -> None:
        """Put the case's plan for this step into force, if it has any."""
        ratios = self.case.ratios
        if self.adapter is not None and ratios is not None:
            force_plan(self.adapter.controller, ratios[step % len(ratios)] if isinstance(ratios, tuple) else ratios)

    def train_step(self, step: int) -> float:
        """One update; the mean loss on the rank of the last stage, 0 on others."""
        losses: list[torch.Tensor] = []
        mean = []
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.case.set_to_none)
        for number in range(self.case.batches):
            if self.case.evaluate:
                self.evaluate(step)
            later = {"finalize_gradients": number == self.case.batches - 1} if self.case.deferred else {}
            self._run(self.schedule.step, batch(self.case, step, self.replica, number), losses, **later)
            mean += [float(loss.detach()) for loss in losses]
        for optimizer in self.optimizers:
            optimizer.step()
        return sum(mean) / len(mean) if mean else 0.0

    def evaluate(self, step: int) -> float:
        losses: list[torch.Tensor] = []
        self._run(self.schedule.eval, batch(self.case, 500 + step, 0), losses)
        return sum(float(loss.detach()) for loss in losses)

    def _run(
        self, call: Callable[..., Any], data: tuple[torch.Tensor, torch.Tensor], losses: list[Any], **more: Any
    ) -> None:
        inputs, labels = data
        if any(stage.is_last for stage in self.stages):
            more |= {"target_mbs": list(self._split(labels))} if self.case.split else {"target": labels}
            more |= {"losses": losses}
        if not any(stage.is_first for stage in self.stages):
            call(**more)
        elif self.case.split:
            call(arg_mbs=[(microbatch,) for microbatch in self._split(inputs)], **more)
        else:
            call(inputs, **more)

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(self.case.microbatches)


def plain(name: str) -> str:
    """A parameter's name without the wrapper's."""
    return name.removeprefix("module.")


def build(case: Case) -> Run:
    """A pipeline of the host alone, on the ranks that run this; what is left of them are replicas."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    mesh = device_mesh(dist.get_world_size() // case.ranks, case.ranks)
    rank = mesh.get_local_rank("pp")
    stages = []
    for index in stage_indices(case, rank):
        if case.traced:
            stages.append(traced(case).build_stage(index, torch.device("cpu"), mesh.get_group("pp")))
            continue
        module = Layers(*stage_layers(index, case.stages), checkpoint=case.checkpoint, adapted=case.adapted)
        for layer in module.layers.values() if case.compiled else ():
            layer.compile()
        for name, layer in [*module.layers.items()] if case.wrapped else ():
            module.layers[name] = torch.compile(layer)
        wrapped = wrap(module.to(case.dtype), case.replicas, mesh["dp"])
        stages.append(PipelineStage(wrapped, index, case.stages, torch.device("cpu"), group=mesh.get_group("pp")))
    optimizers = [make_optimizer(case, stage.submod.parameters()) for stage in stages]
    replica = 0 if case.replicas == "tp" else mesh.get_local_rank("dp")
    return Run(case, make_schedule(case, stages), stages, optimizers, replica)


def traced(case: Case) -> Any:
    """The whole model, cut by torch's tracer where each stage begins."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    begins = [stage_layers(stage, case.stages)[0] for stage in range(1, case.stages)]
    cuts = {f"layers.{layer}": SplitPoint.BEGINNING for layer in begins}
    microbatch = batch(case, 0, 0)[0].chunk(case.microbatches)[0]
    return pipeline(Layers(checkpoint=case.checkpoint, adapted=case.adapted), (microbatch,), split_spec=cuts)


MESHES: dict[tuple[int, int], Any] = {}
"""Kept: what torch caches of a mesh names its groups."""


def device_mesh(replicas: int, ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if (replicas, ranks) not in MESHES:
        MESHES[replicas, ranks] = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
    return MESHES[replicas, ranks]


def teardown() -> None:
    """After every test on a rank."""
    destroy_groups(kept=[group for mesh in MESHES.values() for group in mesh.get_all_groups()])


def stage_indices(case: Case, rank: int) -> tuple[int, ...]:
    if case.schedule in SINGLE:
        return (rank,)
    return (rank, case.stages - 1 - rank) if case.schedule in V_SHAPED else (rank, rank + case.ranks)


def wrap(module: nn.Module, kind: str, mesh: Any) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parallel.distributed import _MixedPrecision

    name, _, variant = kind.partition(" ")
    if name == "ddp":
        group = mesh.get_group()
        return DistributedDataParallel(
            module,
            process_group=group,
            find_unused_parameters=variant == "unused",
            gradient_as_bucket_view=variant == "view",
            static_graph=variant == "static",
            mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16) if variant == "mixed" else None,
        )
    if name == "tp":
        return parallelize_module(
            module,
            mesh,
            {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
        )
    if name == "replicate":
        return replicate(module, mesh=mesh)
    if name == "fsdp":
        offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if variant == "offloaded" else {}
        if variant == "mixed":  # gradients of microbatches are in bf16, and are added up in fp32
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in module.layers.values():
                fully_shard(layer, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
            return fully_shard(module, mesh=mesh, mp_policy=policy)
        if variant in ("nested", "kept"):
            for layer in module.layers.values():
                fully_shard(layer, mesh=mesh, reshard_after_forward=variant == "nested")
        if variant == "whole":
            return fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return fully_shard(module, mesh=mesh, **offloaded)
    return module


def make_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def make_schedule(case: Case, stages: list[Any]) -> Any:
    from torch.distributed.pipelining import schedules as host

    scale = 1 if case.scale_grads else case.microbatches * case.batches
    scaled = lambda logits, labels: loss_fn(logits, labels) / scale  # noqa: E731
    kind = host._PipelineScheduleRuntime if case.csv else getattr(host, case.schedule)
    single = kind.__name__ in SINGLE
    schedule = kind(stages[0] if single else stages, case.microbatches, loss_fn=scaled, scale_grads=case.scale_grads)
    if case.csv:
        schedule._load_csv(case.csv, format="compute_comms" if "comms" in case.csv else "compute_only")
    return schedule


def stages_of(kind: type, ranks: int) -> Any:
    """Stages enough to make a schedule object without any process."""
    from torch.distributed.pipelining import schedules as host

    single = issubclass(kind, host.PipelineScheduleSingle)
    stage = SimpleNamespace(group_rank=0, group_size=ranks, submod=None, num_stages=ranks * (1 if single else 2))
    return stage if single else [stage, stage]


def made(name: str, ranks: int, microbatches: int) -> Any:
    """A schedule object of torch's, by name, without any process."""
    from torch.distributed.pipelining import schedules as host

    kind = getattr(host, name)
    return kind(stages_of(kind, ranks), microbatches)


def attached(case: Case) -> Run:
    """The same pipeline with freezing, as far as the case asks for it."""
    import tf_adapters.torch_pipelining

    run = build(case)
    if case.section is not None:
        run.adapter = tf_adapters.torch_pipelining.attach(
            run.schedule, case.settings(), optimizer=run.optimizers if case.give_optimizer else None
        )
        run.force_plan(0)
    return run


def force_plan(controller: Any, ratios: Plan) -> None:
    """Put the controller into stable freezing with a plan of our choosing."""
    if isinstance(ratios, float):
        testing.force_plan(controller, ratios)
        return
    testing.force_plan(controller, lambda a: ratios.get(f"{a.stage}.{a.microbatch}", ratios.get(f"{a.stage}", 0.0)))


class GradientRecorder:
    """The gradients that the optimizers see, whole, by name."""

    def __init__(self, run: Run) -> None:
        self.latest: dict[str, torch.Tensor] = {}
        self._run = run
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(self._record)

    def _record(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of_mine = {name: p for name, p in self._run.named.items() if id(p) in mine}
        self.latest |= {name: torch.zeros(p.shape) for name, p in of_mine.items() if p.grad is None}
        self.latest |= whole({name: p.grad for name, p in of_mine.items() if p.grad is not None})


def whole(tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Copies of all of each tensor, wherever FSDP has put the rest: one exchange, where torch makes two for each."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    copies = {key: t.detach().clone() for key, t in tensors.items() if not isinstance(t, DTensor)}
    spread = {key: t for key, t in tensors.items() if isinstance(t, DTensor)}
    if spread:
        (mesh,) = {t.device_mesh for t in spread.values()}
        local = {key: t.detach().to_local().clone() for key, t in spread.items()}
        parts: list[Any] = [None] * mesh.size()
        dist.all_gather_object(parts, local, mesh.get_group())
        for key, t in spread.items():
            (placement,) = t.placements
            pieces = [part[key] for part in parts]
            copies[key] = torch.cat(pieces, placement.dim) if placement.is_shard() else pieces[0]
            assert copies[key].shape == t.shape
    return copies


def values(run: Run) -> dict[str, torch.Tensor]:
    return whole(run.named)


def optimizer_state(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Parameter and optimizer state by name, whole."""
    by_parameter = {p: s for optimizer in run.optimizers for p, s in optimizer.state.items()}
    tensors = {(name, "value"): p for name, p in run.named.items()}
    for name, p in run.named.items():
        tensors |= {(name, kind): v for kind, v in by_parameter.get(p, {}).items() if torch.is_tensor(v)}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for (name, kind), value in whole(tensors).items():
        found.setdefault(name, {})[kind] = value
    return found


def train(case: Case) -> dict[str, Any]:
    """Train; with ``recorded``, keep for every step what the oracle needs."""
    run = attached(case)
    recorder = GradientRecorder(run) if case.recorded else None
    with recorded_draws() as draws:
        steps = [_step(run, recorder, step) for step in range(case.steps)]
    result: dict[str, Any] = {"replica": run.replica, "steps": steps, "parameters": values(run)}
    if run.adapter is not None:
        run.adapter.finish_step()  # the ranks decide before the next batch, or here
        controller = run.adapter.controller
        result |= {
            "draws": draws,
            "schedule": controller.schedule.to_text(),
            "failure": controller.state.failure,
            "plan": controller.state.plan and controller.state.plan.to_json(),
            "sent_bytes": dict(controller.pipeline.sent_bytes),
            "step": controller.step,
        }
    return result


def _step(run: Run, recorder: GradientRecorder | None, step: int) -> dict[str, Any]:
    """One step, and what the oracle needs of it."""
    run.force_plan(step)
    phase = run.adapter.controller.phase.value if run.adapter is not None else None
    if recorder is None:
        return {"phase": phase, "loss": run.train_step(step)}
    if run.adapter is not None:
        run.adapter.finish_step()  # the ranks decide now, not before their next batch, which masks it has
    before, masks, trained = values(run), masks_of(run), trained_names(run)
    state_before = optimizer_state(run) if run.case.state else {}
    loss = run.train_step(step)
    return {
        "phase": phase,
        "loss": loss,
        "number": run.adapter and run.adapter.controller.step - 1,
        "before": before,
        "gradients": dict(recorder.latest),
        "masks": masks,
        "state_before": state_before,
        "state_after": optimizer_state(run) if run.case.state else {},
        "trained": trained,
        "still_trained": trained_names(run),
    }


def trained_names(run: Run) -> set[str]:
    return {name for name, p in run.named.items() if p.requires_grad}


def masks_of(run: Run) -> dict[tuple[int, int], tuple[str, ...]]:
    """Frozen names of the next step, by stage and microbatch."""
    if run.adapter is None:
        return {}
    controller = run.adapter.controller
    return {
        (s, m): tuple(map(plain, controller.frozen_parameters(controller.step, s, m)))
        for s in range(run.case.stages)
        for m in range(run.case.microbatches)
    }


def losses_of(run: Run, steps: range) -> list[float]:
    return [run.train_step(step) for step in steps]
