"""The vision example: its layers, its data, its three partitions, and both models on two real ranks."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import forked_deepspeed
from torch import nn

pytest.importorskip("sklearn")
pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
VISION = ROOT / "examples" / "vision"


def load_example() -> dict[str, ModuleType]:
    """Import the example's files; `train`, a name that other examples have too, is forgotten again."""
    sys.path.insert(0, str(VISION))
    try:
        return {name: importlib.import_module(name) for name in ("data", "costs", "models", "partition", "train")}
    finally:
        sys.path.remove(str(VISION))
        for name in ("data", "train"):
            sys.modules.pop(name, None)


data, costs, models, partition, train = load_example().values()
VIT = models.ViTConfig(width=16, depth=2)
CONVNEXT = models.ConvNeXtConfig(width=8, depths=(1, 2, 1))


def build(config: Any) -> nn.Sequential:
    return nn.Sequential(*(spec.build() for spec in config.layers()))


# --- where to cut --------------------------------------------------------------------------------------------


def stages_of(boundaries: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(stage, *ends) for stage, ends in enumerate(itertools.pairwise(boundaries))]


def every_partition(layers: int, stages: int) -> list[list[int]]:
    return [[0, *inner, layers] for inner in itertools.combinations(range(1, layers), stages - 1)]


def largest(cost: Any, boundaries: Sequence[int]) -> float:
    return max(cost(*stage) for stage in stages_of(boundaries))


def random_layers(draw: random.Random, count: int) -> list[Any]:
    return [
        costs.LayerCost("layer", draw.randrange(1000), draw.randrange(50000), draw.random(), draw.random())
        for _ in range(count)
    ]


@pytest.mark.parametrize("heuristic", partition.HEURISTICS)
def test_no_partition_has_a_smaller_largest_stage(heuristic: str) -> None:
    draw = random.Random(0)
    for _ in range(60):
        layers, stages = draw.randint(1, 9), draw.randint(1, 5)
        if stages > layers:
            continue
        in_flight = partition.microbatches_in_flight(stages, microbatches=8, schedule=draw.choice(["host", "gpipe"]))
        pipeline = partition.Stages(random_layers(draw, layers), in_flight)
        cost = {
            "parameters": pipeline.parameters,
            "memory": pipeline.memory_bytes,
            "time": pipeline.time_ms,
        }[heuristic]
        found = pipeline.boundaries(heuristic)
        assert found in every_partition(layers, stages), "contiguous, every layer once, no stage empty"
        assert largest(cost, found) == min(largest(cost, other) for other in every_partition(layers, stages))


def test_equal_layers_are_shared_evenly() -> None:
    def count(stage: int, start: int, stop: int) -> int:
        return stop - start

    sizes = [stop - start for _, start, stop in stages_of(partition.split(count, layers=10, stages=4))]
    assert sorted(sizes) == [2, 2, 3, 3]


def test_deepspeeds_own_partition_is_not_the_one_with_the_smallest_largest_stage() -> None:
    """Why the example has its own: should this fail one day, `partition_balanced` can replace it."""
    from deepspeed.runtime.utils import partition_balanced

    worse = 0
    draw = random.Random(0)
    for _ in range(50):
        weights = [draw.randrange(1, 100) for _ in range(8)]

        def cost(stage: int, start: int, stop: int, weights: list[int] = weights) -> int:
            return sum(weights[start:stop])

        worse += largest(cost, partition_balanced(weights, 4)) > largest(cost, partition.split(cost, 8, 4))
    assert worse > 0


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0)])
def test_stages_that_cannot_be_filled_are_refused(layers: int, stages: int) -> None:
    with pytest.raises(ValueError, match=f"^3 layers do not fill {stages} stages$"):
        partition.split(lambda stage, start, stop: 1.0, layers, stages)


def test_memory_counts_the_microbatches_that_a_stage_holds() -> None:
    layers = [costs.LayerCost("layer", parameters=10, activation_bytes=1000, forward_ms=1, backward_ms=2)] * 2
    for schedule, in_flight in (("host", [2, 1]), ("gpipe", [8, 8])):
        assert partition.microbatches_in_flight(2, 8, schedule) == in_flight
        pipeline = partition.Stages(layers, in_flight)
        assert pipeline.memory_bytes(0, 0, 1) == 10 * 16 + in_flight[0] * 1000
        assert pipeline.memory_bytes(1, 0, 2) == 20 * 16 + in_flight[1] * 2000
    assert partition.microbatches_in_flight(4, 2, "host") == [2, 2, 2, 1]


# --- what layers cost ----------------------------------------------------------------------------------------


def test_activations_are_what_autograd_keeps() -> None:
    layers = [nn.Linear(4, 6, bias=False), nn.GELU(), nn.Linear(6, 3, bias=False)]
    inputs, labels = torch.randn(20, 4)[:5], torch.randint(3, (5,))
    measured = costs.measure(layers, inputs, labels, lambda logits, labels: logits.sum(), repeats=2)
    assert [cost.parameters for cost in measured] == [24, 0, 18]
    assert [cost.activation_bytes for cost in measured] == [5 * 4 * 4, 5 * 6 * 4, 5 * 6 * 4], "each keeps its input"
    assert [cost.name for cost in measured] == ["Linear", "GELU", "Linear"]
    assert all(cost.forward_ms > 0 and cost.backward_ms > 0 for cost in measured)


@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=["vit", "convnext"])
def test_activations_grow_with_the_microbatch_and_parameters_do_not(config: Any) -> None:
    net = build(config)
    one, three = (
        costs.measure(list(net), torch.randn(size, 1, 32, 32), torch.arange(size), models.loss_fn, repeats=1)
        for size in (2, 6)
    )
    total = sum(parameter.numel() for parameter in net.parameters())
    for measured in (one, three):
        assert sum(cost.parameters for cost in measured) == total
    for small, large in zip(one, three, strict=True):
        assert large.activation_bytes == pytest.approx(3 * small.activation_bytes, rel=0.05)


def test_early_convnext_blocks_have_large_activations_and_late_ones_many_parameters() -> None:
    inputs, labels = torch.randn(2, 1, 32, 32), torch.tensor([3, 7])
    measured = costs.measure(list(build(CONVNEXT)), inputs, labels, models.loss_fn, repeats=1)
    blocks = [cost for cost in measured if cost.name == "ConvNeXtBlock"]
    assert blocks[0].activation_bytes > 3 * blocks[-1].activation_bytes
    assert blocks[-1].parameters > 3 * blocks[0].parameters
    pipeline = partition.Stages(measured, [2, 1])
    assert pipeline.boundaries("parameters")[1] > pipeline.boundaries("memory")[1]


# --- the models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=["vit", "convnext"])
def test_every_parameter_of_a_model_learns(config: Any) -> None:
    net = build(config)
    logits = net(torch.randn(3, 1, 32, 32))
    assert logits.shape == (3, 10)
    models.loss_fn(logits, torch.tensor([1, 2, 3])).backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_convnext_halves_the_image_and_doubles_the_channels() -> None:
    x, shapes = torch.randn(2, 1, 32, 32), []
    for layer in build(CONVNEXT):
        x = layer(x)
        assert x.is_contiguous(), "what a stage sends has to be"
        shapes.append(tuple(x.shape[1:]))
    fine, middle, coarse = (16, 16, 8), (8, 8, 16), (4, 4, 32)
    assert shapes == [fine, fine, middle, middle, middle, coarse, coarse, (10,)]


def test_global_response_norm_is_the_papers() -> None:
    norm = models.GlobalResponseNorm(3)
    x = torch.randn(2, 4, 5, 3)
    torch.testing.assert_close(norm(x), x, msg="it starts as the identity")
    nn.init.normal_(norm.scale)
    nn.init.normal_(norm.shift)
    for image, result in zip(x, norm(x), strict=True):
        size = torch.stack([image[..., channel].norm() for channel in range(3)])
        expected = norm.scale * image * (size / size.mean()) + norm.shift + image
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [VIT, CONVNEXT], ids=["vit", "convnext"])
def test_weights_depend_on_the_config_only(config: Any) -> None:
    torch.manual_seed(1)
    forwards = [spec.build().state_dict() for spec in config.layers()]
    torch.manual_seed(2)
    backwards = [spec.build().state_dict() for spec in reversed(config.layers())][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- the data ------------------------------------------------------------------------------------------------


def test_split_keeps_every_image_once_and_depends_on_the_seed_only() -> None:
    training, test = data.split(1797, seed=0)
    assert sorted([*training.tolist(), *test.tolist()]) == list(range(1797))
    assert len(test) == pytest.approx(1797 / 5, abs=1)
    assert torch.equal(test, data.split(1797, seed=0)[1])
    assert not torch.equal(test, data.split(1797, seed=1)[1])


def test_images_are_enlarged_and_normalised() -> None:
    training, test = data.load(size=16)
    assert len(training) + len(test) == 1797
    images, labels = training.tensors
    assert images.shape[1:] == (1, 16, 16)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    assert sorted(labels.unique().tolist()) == list(range(10))


def test_a_missing_package_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r"^the images need a package: pip install scikit-learn$"):
        data.load()


# --- arguments -----------------------------------------------------------------------------------------------

PLAIN = str(ROOT / "deepspeed_configs" / "plain.json")
WRONG = {
    "--model mlp": "argument --model: invalid choice: 'mlp'",
    "--partition layers": "argument --partition: invalid choice: 'layers'",
    "--depths 2 2": "--depths has 2 numbers: a ViT has one",
    "--depths 0": "depth is 0: a vision transformer needs at least one block",
    "--width 30": "width 30 is not a multiple of 4 heads",
    "--model convnext --depths 1 0": "depths are [1, 0]: every level needs at least one block",
    "--model convnext --depths 1 1 1 1 1 1": "6 levels shrink an image by 64, which does not fit 32",
    "--stages 5 --depths 1": "--stages 5: the model's 3 layers allow 1 to 3",
    "--stages 3": "--stages 3: start a multiple of that many processes, not 2",
    "--steps 0": "--steps 0 is not at least 1",
    "--deepspeed_config none.json": "--deepspeed_config none.json: no such file",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_one_clear_line(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as caught:
        train.parse_args(["--deepspeed_config", PLAIN, *arguments.split()])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {WRONG[arguments]}" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ('{"train_batch_size": 32}', 'has no "train_micro_batch_size_per_gpu": the partition depends on it'),
    ],
)
def test_a_config_that_does_not_say_enough_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} {re.escape(message)}"):
        train.read_ds_config(str(path))


# --- two real ranks ------------------------------------------------------------------------------------------

STEPS = 40
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.0,
    "steps_per_print": 5,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
}
SECTION = {"warmup_steps": 2, "monitoring_steps": 6, "progressive_steps": 4, "max_freeze_ratio": 0.5}


def launch(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Run the example on two ranks; its exit code, and all that it said."""
    settings = tmp_path / "ds_config.json"
    section = {**SECTION, "output_dir": str(tmp_path), "on_error": "raise"}
    settings.write_text(json.dumps({**DS_CONFIG, "timely_freeze": section}))
    return forked_deepspeed(VISION / "train.py", settings, "--steps", STEPS, *arguments)


@pytest.mark.programs
@pytest.mark.parametrize(
    ("model", "heuristic", "sizes"),
    [
        ("vit", "memory", ["--width", "32", "--depths", "2"]),
        ("convnext", "time", ["--width", "8", "--depths", "1", "1", "2"]),
    ],
)
def test_a_model_learns_while_it_freezes(model: str, heuristic: str, sizes: list[str], tmp_path: Path) -> None:
    code, output = launch(tmp_path, "--model", model, "--partition", heuristic, *sizes)
    assert code == 0, output
    lines = output.splitlines()
    table = lines[lines.index(f"{model}, partition by {heuristic}:") + 1 :][:3]
    assert table[0].split() == ["stage", "layers", "parameters", "memory", "time"]
    assert [line.split()[0] for line in table[1:]] == ["0", "1"]
    losses = [float(loss) for loss in re.findall(r"^steps: \d+ loss: ([0-9.]+)", output, re.MULTILINE)]
    assert len(losses) == STEPS // DS_CONFIG["steps_per_print"]
    assert losses[-1] < 0.8 * losses[0]
    (accuracy,) = re.findall(rf"^step {STEPS}: test accuracy ([0-9.]+)$", output, re.MULTILINE)
    assert float(accuracy) > 0.4, "chance is 0.1"
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert set(report["plan"]["stage_freeze_ratio"]) == {"0", "1"}
