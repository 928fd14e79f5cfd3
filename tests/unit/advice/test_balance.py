"""Times of layers, where a model had better be cut, and how that is said to each host."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch

from tf_adapters.advice.balance import Cut
from tf_adapters.advice.partition import CutPipeline, Piece
from tf_adapters.cli import main
from tf_adapters.cli.balance import say_it
from tf_adapters.hosts.layers import layers_of
from tf_adapters.measuring.layer_times import LayerTimer
from tf_adapters.measuring.timer import Clock
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.ir import Action, Kind
from tf_adapters.schedule.orders import one_forward_one_backward

STAGES, MICROBATCHES = 3, 4


class CountedClock(Clock):
    """A millisecond passes between two marks, and as long as a layer says."""

    now = 0

    def mark(self) -> int:
        self.now += 1_000_000
        return self.now


class Wait(torch.nn.Linear):
    """A layer that takes so many ms in its forward and twice that in its backward."""

    def __init__(self, clock: CountedClock, ms: int) -> None:
        super().__init__(4, 4)
        self._clock, self._ms = clock, ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.now += self._ms * 1_000_000
        # Hooks on it run when the layer's backward ends.
        x = x.clone() if x.requires_grad else x.requires_grad_()
        x.register_hook(self._passed)
        return super().forward(x)

    def _passed(self, gradient: torch.Tensor) -> None:
        self._clock.now += 2 * self._ms * 1_000_000


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = torch.nn.Embedding(3, 2), torch.nn.Dropout()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([Block(), Block()])
        self.decoder.norm = torch.nn.LayerNorm(2)
        self.output = torch.nn.Linear(2, 3)


# --- times ------------------------------------------------------------------------------------------------------


def test_layers_are_the_members_of_the_outermost_lists_and_what_stands_beside_them():
    assert list(layers_of(Model())) == ["embedding", "decoder.layers.0", "decoder.layers.1", "decoder.norm", "output"]
    nested = torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.Linear(1, 1)]), "b": torch.nn.ReLU()})
    assert list(layers_of(nested)) == ["a.0", "b"]
    assert layers_of(torch.nn.ReLU()) == {}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_the_time_between_two_marks_is_the_first_ones_layer(recomputed):
    clock = CountedClock()
    stage = torch.nn.Sequential(Wait(clock, 10), Wait(clock, 40))
    timer = LayerTimer(layers := {0: layers_of(stage)}, clock)
    timer.on(layers)
    for microbatch in range(3):
        x = torch.ones(2, 4)
        with timer.timed(Action(0, Kind.FORWARD, microbatch)):
            for layer in stage:
                recompute = torch.utils.checkpoint.checkpoint
                x = recompute(layer, x, use_reentrant=False) if recomputed else layer(x)
        with timer.timed(Action(0, Kind.BACKWARD, microbatch)):
            x.sum().backward()
    timer.off()
    first, second = timer.times()[0].layers
    again = 1 if recomputed else 0
    assert (first.name, second.name) == ("0", "1")
    assert (first.forward_ms, second.forward_ms) == pytest.approx((10, 40), abs=2)
    assert (first.backward_ms, second.backward_ms) == pytest.approx((20 + 10 * again, 80 + 40 * again), abs=5)
    assert first.parameters == 20
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in stage)


def test_weight_gradients_that_are_computed_apart_are_spread_by_parameters():
    clock = CountedClock()
    stage = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 12))
    timer = LayerTimer(layers := {0: layers_of(stage)}, clock)
    timer.on(layers)
    with timer.timed(Action(0, Kind.FORWARD, 0)):
        output = stage(torch.ones(2, 4))
    with timer.timed(Action(0, Kind.INPUT_GRAD, 0)):
        output.sum().backward()
    with timer.timed(Action(0, Kind.WEIGHT_GRAD, 0)):
        clock.now += 79_000_000
    first, second = timer.times()[0].layers
    assert (first.backward_ms, second.backward_ms) == pytest.approx((20, 60), abs=2)


def test_what_fails_leaves_no_sample():
    timer = LayerTimer({0: {}}, CountedClock())
    timer.on({0: {}})
    with pytest.raises(KeyError), timer.timed(Action(0, Kind.FORWARD, 0)):
        raise KeyError
    assert timer.times() == {}


# --- cuts -------------------------------------------------------------------------------------------------------


def pipeline(pieces: list[Piece], rest: float = 0.0) -> CutPipeline:
    schedule = one_forward_one_backward(STAGES, MICROBATCHES)
    dag, rests = PipelineDag.from_schedule(schedule), [Piece((), rest, rest)] * STAGES
    return CutPipeline(dag, pieces=pieces, rest=rests, halves=[0.5] * STAGES)


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_are_the_best_of_all_or_next_to_them(seed):
    draw = random.Random(seed)
    pieces = [Piece((str(i),), draw.choice([1, 2, 2, 2, 7]), draw.choice([2, 4, 4, 4, 13])) for i in range(9)]
    every = list(itertools.combinations(range(1, 9), STAGES - 1))
    found = pipeline(pieces, rest=draw.random())
    assert found.span_ms(found.best_cuts((1, 2))) <= 1.02 * min(map(found.span_ms, every))


def test_equal_layers_are_cut_into_equal_stages():
    pieces = [Piece((str(i),), 1.0, 2.0) for i in range(12)]
    assert pipeline(pieces).best_cuts((1, 2)) == (4, 8)
    assert pipeline(pieces).stage_times((4, 8)) == ((4.0, 8.0),) * 3


# --- the command ------------------------------------------------------------------------------------------------


def report(host: str = "deepspeed", layers: bool = True) -> dict[str, Any]:
    """Two stages of four equal layers, all but one of them on the first."""
    schedule = one_forward_one_backward(2, 4)
    of_stage = {0: ["0", "1", "2"], 1: ["3"]}
    times = {
        str(a): [len(of_stage[a.stage]) * (10.0 if a.kind is Kind.FORWARD else 20.0)] * 2 for a in schedule.actions
    }
    timed = {
        str(stage): {
            "layers": [{"name": n, "forward_ms": 5.0, "backward_ms": 10.0, "parameters": 7} for n in names],
            "rest_forward_ms": 0.0,
            "rest_backward_ms": 0.0,
        }
        for stage, names in of_stage.items()
    }
    return {
        **{"format": 1, "host": {"name": host, "version": "1", "device": "emulated"}, "status": "stable", "step": 9},
        **{"schedule": {"ranks": schedule.to_text()}, "times": times, "layers": timed if layers else {}},
        "measured": {"step_ms_unfrozen": 500.0},
    }


def test_the_page_says_what_to_move_and_what_that_brings(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert main(["balance", str(path)]) == 0
    text = capsys.readouterr().out
    # 4 x 90 ms on the first stage, which never waits; then 4 x 60, and 60 in which the pipeline fills and drains.
    assert "step 500.0 ms -> 440.0 ms predicted: 1.14x" in text
    assert "deepspeed 1 on emulated devices: 3 | 1 layers" in text
    assert "2 | 2 layers" in text
    assert "begin at layers [0, 2]" in text


def test_a_model_that_is_cut_well_stays(tmp_path, capsys):
    data = report()
    for text, pair in data["times"].items():
        pair[:] = [10.0, 10.0] if "F" in text else [20.0, 20.0]
    first, _ = data["layers"].values()
    first["layers"] = first["layers"][:1]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    assert main(["balance", str(path)]) == 0
    assert "as well as they can be" in capsys.readouterr().out


@pytest.mark.parametrize("layers", [True, False])
def test_what_is_missing_is_one_line(layers, tmp_path, capsys):
    data = report(layers=False)
    data["times"] = data["times"] if not layers else {}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    assert main(["balance", str(path)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"tf-adapters balance: {path}: ")
    assert ("no action has been timed" if layers else "timely_freeze.warmup_steps") in line
    assert "\n" not in line


def test_each_host_is_told_in_its_own_way():
    megatron = [
        ("embedding", "decoder.layers.0"),
        ("decoder.layers.0", "decoder.layers.1"),
        ("decoder.layers.0", "decoder.final_layernorm", "output_layer"),
    ]
    none = {"parameters": (), "stage_ms": (), "makespan_ms": 1.0}
    assert say_it("megatron-core", Cut(tuple(megatron), **none)) == "--pipeline-model-parallel-layout 'Et|t*2|tL'"
    strange = Cut((("decoder.layers.0", "vision.embedding"),), **none)
    assert say_it("megatron-core", strange).startswith("the stages' layers: [[")
    parts = Cut((("tok_embeddings", "layers.0"), ("layers.1", "output")), **none)
    said = say_it("torch.distributed.pipelining", parts)
    assert said.endswith('module_fqns_per_model_part: [["tok_embeddings", "layers.0"], ["layers.1", "output"]]')
