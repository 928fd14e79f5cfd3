"""Error and cost of masks and of the sampled stability metrics, against planned work and against all elements.

A small decoder learns the bytes of a text. Every few steps its updates are judged twice: from samples, as a run does,
and from two full copies of the model, as the formulas are written.

    python -m benchmarks.core.selection              # under three minutes on one core.
    python -m benchmarks.core.selection --draws      # only draws and the cost of masks, half a minute
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import result_file, use_example, write_json
from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.selection import sampling
from tf_adapters.selection.apf import Apf
from tf_adapters.selection.autofreeze import AutoFreeze, layers_of
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.selection.sampling import whole_parameters
from tf_adapters.selection.stability import StabilityChecks, StabilityState
from tf_adapters.selection.updates import Snapshot, Updates, unit_places
from tf_adapters.simulate.model_costs import LLAMA_1B, LLAMA_8B, LLAMA_13B, LlamaShape
from tf_adapters.testing.plans import tensor_units

WIDTH, BLOCKS, HEADS, CONTEXT, ROWS = 512, 4, 8, 64, 8
INTERVAL = 4
ALPHA = 0.9
PAPERS_THRESHOLD, PAPERS_PERCENTILE = 0.01, 80.0  # LLaMA-3.2-1B's
CUTS = {"as one stage": 1, "as four stages": 4, "as many stages": 51}
"""In how many stages of as many tensors the model is read; in the last case every tensor has all that it may have."""
RESULT = result_file("core/selection.json")
STAGES, MICROBATCHES = 4, 8  # of the paper's runs
UNEVEN = [0.0, 0.35, 0.9, 1.0, 1.0, 0.62, 0.99, 0.4]


class Decoder(nn.Module):
    """A decoder of bytes, all in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def training(model: nn.Module, steps: int) -> Iterator[float]:
    """Train; yields each step's time in ms."""
    use_example()
    from text import load_text

    text = torch.frombuffer(bytearray(load_text("topics")), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        began = time.perf_counter()
        starts = torch.randint(len(text) - CONTEXT - 1, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield (time.perf_counter() - began) * 1e3


# --- error ---------------------------------------------------------------------------------------------------


class Full:
    """The formulas over every element: two more copies of the model, and the weights of the last check."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._then = {name: p.detach().clone() for name, p in parameters.items()}
        self._averages = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._then.items()}

    def check(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
        """Scores of each tensor, and its share of its layer's squared norm."""
        found: dict[str, dict[str, float]] = {"tensor": {}, "squares": {}}
        for name, parameter in parameters.items():
            delta = parameter.detach() - self._then[name]
            trend, size = self._averages[name]
            trend.mul_(ALPHA).add_(delta, alpha=1 - ALPHA)
            size.mul_(ALPHA).add_(delta.abs(), alpha=1 - ALPHA)
            total = float(size.double().sum())
            found["tensor"][name] = abs(float(trend.double().sum())) / total
            found["squares"][name] = float((delta.double() ** 2).sum())
            self._then[name].copy_(parameter.detach())
        return found


class Sampled:
    """The same from samples, through the package's own classes; of samples as the model cut into stages has them."""

    def __init__(self, stages: int, parameters: Mapping[str, torch.Tensor]) -> None:
        self._units = {0: tensor_units(parameters)}  # type: ignore[arg-type]
        self._places = unit_places(self._units)
        self._layers = AutoFreeze(layers_of(self._units), 80.0)
        self._memory: dict[str, np.ndarray] = {}
        self._numel = np.array([p.numel() for p in parameters.values()])
        cut = np.arange(len(parameters)) * stages // len(parameters)
        self.sizes = sampling.sample_sizes(cut, cut, self._numel)
        self._then = self._snapshot(parameters)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        now = self._snapshot(parameters)
        updates = Updates.between(self._then, now, self._places)
        self._then = now
        found = {"norms": self._layers.norms(updates)}
        apf = Apf(0.0, periods=False, alpha=ALPHA)
        trend, size = apf.averages(self._memory, updates, np.ones(updates.units, bool))
        self._memory = {"trend": trend, "size": size}
        return {**found, "tensor": apf.scores(trend, size, updates)}

    def _snapshot(self, parameters: Mapping[str, torch.Tensor]) -> Snapshot:
        keys = tuple((0, name, ()) for name in parameters)
        reading = sampling.read(0, zip(keys, parameters.values(), self.sizes.tolist(), strict=True))
        return Snapshot(0, keys, self._numel, self.sizes, *sampling.unpacked(reading, len(keys)))


def errors(model: nn.Module, steps: int) -> dict[str, Any]:
    """Return the errors of sampled metrics against those of all elements.

    Relative errors are by statistic and by cut of the model, over tensors (layers) and checks. The shares say how many
    tensors (of the lowest layers) are judged alike, at the paper's settings. The last check's scores follow.
    """
    parameters = dict(model.named_parameters())
    full, sampled = Full(parameters), {cut: Sampled(stages, parameters) for cut, stages in CUTS.items()}
    layers = layers_of({0: tensor_units(parameters)})
    found: dict[str, list[float]] = {}
    agreed: dict[str, list[float]] = {}
    before: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # norms, of all elements and estimated
    step_ms = []
    for step, ms in enumerate(training(model, steps), start=1):
        step_ms.append(ms)
        if step % INTERVAL:
            continue
        exact = full.check(parameters)
        norms = np.sqrt(np.bincount(layers, list(exact["squares"].values())))
        for cut, of_cut in sampled.items():
            estimate = of_cut.check(parameters)
            true = np.array([exact["tensor"][name] for name in parameters])
            found.setdefault(f"apf score, tensor, {cut}", []).extend(np.abs(estimate["tensor"] / true - 1))
            same = (estimate["tensor"] < PAPERS_THRESHOLD) == (true < PAPERS_THRESHOLD)
            agreed.setdefault(f"apf, tensor, {cut}", []).extend(same)
            found.setdefault(f"layer's update norm, {cut}", []).extend(np.abs(estimate["norms"] / norms - 1))
            if cut in before:
                true, estimated = (
                    np.abs(then - now) / then for then, now in zip(before[cut], (norms, estimate["norms"]), strict=True)
                )
                found.setdefault(f"autofreeze score (absolute), {cut}", []).extend(np.abs(estimated - true))
                lowest = int(PAPERS_PERCENTILE / 100 * len(norms))
                same = set(np.argsort(true)[:lowest]) & set(np.argsort(estimated)[:lowest])
                agreed.setdefault(f"autofreeze, {cut}", []).append(len(same) / lowest)
            before[cut] = norms, estimate["norms"]
    summary = {
        name: {"median": float(np.median(of)), "p95": float(np.quantile(of, 0.95)), "max": float(np.max(of))}
        for name, of in found.items()
    }
    scores = {"tensor": np.quantile(list(exact["tensor"].values()), (0.0, 0.5, 1.0)).tolist()}
    return {
        "step_ms": statistics.median(step_ms),
        "relative_error": summary,
        "same_decision": {name: float(np.mean(of)) for name, of in agreed.items()},
        "score_min_median_max": scores,
        "largest_sample": {cut: int(of_cut.sizes.max()) for cut, of_cut in sampled.items()},
    }


# --- time and memory -----------------------------------------------------------------------------------------


def check_ms(model: nn.Module, method: str) -> float:
    """One check of a whole model in one process, in ms."""
    parameters = {0: dict(model.named_parameters())}
    units = {0: tensor_units(parameters[0])}
    config = TimelyFreezeConfig(method=method)
    checks = StabilityChecks(config, units, [0], whole_parameters(parameters), Collectives())
    state = checks.run(StabilityState(), 0, 0)
    return timed(lambda: checks.run(state, config.stability_check_interval, 0), 5)


def timed(call: Callable[[], Any], times: int) -> float:
    """Median ms of a call."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.median(found)


def llama_units(shape: LlamaShape) -> dict[int, list[FreezeUnit]]:
    """Every tensor of a Llama, in four stages of as many layers."""
    width, keys = shape.hidden_size, shape.hidden_size // shape.num_attention_heads * shape.num_key_value_heads
    inner = shape.intermediate_size
    block = [(width, width), (keys, width), (keys, width), (width, width)]
    block += [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    stages: dict[int, list[FreezeUnit]] = {stage: [] for stage in range(STAGES)}
    for layer in range(shape.num_hidden_layers):
        for place, size in enumerate(block):
            stages[layer * STAGES // shape.num_hidden_layers].append(unit(f"layers.{layer}.{place}", size))
    stages[0].insert(0, unit("embedding", (shape.vocab_size, width)))
    stages[STAGES - 1] += [unit("norm", (width,)), unit("head", (shape.vocab_size, width))]
    return stages


def unit(name: str, shape: tuple[int, ...]) -> FreezeUnit:
    return FreezeUnit((name,), float(np.prod(shape)), shape)


def llama_costs(shape: LlamaShape) -> dict[str, float]:
    """Memory of the first rank (values of all stages), the checkpoint, and drawing one rank's masks of a step."""
    units = llama_units(shape)
    elements = {u.names[0]: int(u.work) for of_stage in units.values() for u in of_stage}
    stages = np.array([stage for stage, of_stage in units.items() for _ in of_stage])
    numel = np.array(list(elements.values()))
    sizes = sampling.sample_sizes(stages, stages, numel)
    samples = int(sizes.sum())
    keys = tuple((0, name, ()) for name in elements)
    snapshot = Snapshot(0, keys, numel, sizes, np.zeros(len(keys)), np.zeros(samples, np.float32))
    state = StabilityState(1, {}, True, {}, snapshot)
    masks = StageMasks(units, seed=0)
    preferred = frozenset(range(len(units[1]) // 3))

    steps = itertools.count()

    def draw(chosen: frozenset[int]) -> None:
        masks.draw(next(steps), 1, [0.6] * MICROBATCHES, chosen)

    draw(preferred)
    return {
        "samples": samples,
        "state_mb": samples * 4 / 1e6,
        "checkpoint_mb": len(json.dumps(state.to_json())) / 1e6,
        "masks_ms_a_step_uniform": timed(lambda: draw(frozenset()), 20),
        "masks_ms_a_step_hybrid": timed(lambda: draw(preferred), 20),
    }


# --- draws ---------------------------------------------------------------------------------------------------


def transformer(blocks: int, width: int, inner: int, matrices: int) -> list[FreezeUnit]:
    """A stage of equal blocks with norms: four attention matrices, or one of three and one, and the MLP's."""
    attention = [(3 * width, width), (width, width)] if matrices == 2 else [(width, width)] * 4
    mlp = [(inner, width)] * (matrices - 1) + [(width, inner)]
    sizes = [*attention, *mlp, (width,), (width,)]
    return [unit(f"{block}.{place}", size) for block in range(blocks) for place, size in enumerate(sizes)]


def drawn_stages() -> dict[str, list[FreezeUnit]]:
    """Stages such as the examples' and those of LLaMA-3-8B."""
    llama = llama_units(LLAMA_8B)
    return {
        "GPT, 4 blocks of width 256": transformer(4, 256, 1024, 2),
        "Llama, 4 blocks of width 256": transformer(4, 256, 682, 3),
        "LLaMA-3-8B, 8 blocks": llama[1],
        "LLaMA-3-8B, 8 blocks and head": llama[STAGES - 1],
    }


def draw_errors(units: list[FreezeUnit], ratios: Sequence[float], steps: int) -> dict[str, float]:
    """Compare draws for a whole step with separate draws for each microbatch.

    Returns the standard deviation of a microbatch's frozen share, and how often a unit is left out of a step.
    """
    masks = StageMasks({0: units}, seed=0)
    number = itertools.count()
    together = [masks.draw(next(number), 0, ratios) for _ in range(steps)]
    alone = [tuple(masks.draw(next(number), 0, [ratio])[0] for ratio in ratios) for _ in range(steps)]
    found = {}
    for name, drawn in (("together", together), ("each for itself", alone)):
        missed = [mask.share - ratio for of_step in drawn for mask, ratio in zip(of_step, ratios, strict=True)]
        left_out = [len(set.intersection(*(set(mask.names) for mask in of_step))) for of_step in drawn]
        found[f"deviation, {name}"] = float(np.std(missed))
        found[f"left out, {name}"] = statistics.mean(left_out) / len(units)
    return found


def draws(steps: int = 400) -> dict[str, dict[str, dict[str, float]]]:
    """By stage and plan."""
    plans = {"0.57": [0.57] * MICROBATCHES, "0.8": [0.8] * MICROBATCHES, "uneven": UNEVEN}
    return {
        stage: {plan: draw_errors(units, ratios, steps) for plan, ratios in plans.items()}
        for stage, units in drawn_stages().items()
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--draws", action="store_true", help="draws and what masks cost only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(RESULT.read_text()) if args.draws else stability(args.steps)
    llamas = {"1B": LLAMA_1B, "8B": LLAMA_8B, "13B": LLAMA_13B}
    result |= {"llama": {name: llama_costs(shape) for name, shape in llamas.items()}, "draws": draws()}
    write_json(RESULT, result)
    print(json.dumps(result, indent=1))


def stability(steps: int) -> dict[str, Any]:
    """Return the errors of the stability metrics, and the time of a check."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    model = Decoder()
    sampled = errors(model, steps)
    checks = {
        name: check_ms(model, method)
        for name, method in {"apf, tensor": "timely+apf", "autofreeze": "timely+autofreeze"}.items()
    }
    interval = TimelyFreezeConfig().stability_check_interval
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **sampled,
        "check_ms": checks,
        "checks_share_of_training": {name: ms / interval / sampled["step_ms"] for name, ms in checks.items()},
    }


if __name__ == "__main__":
    main()
