"""The benchmark of the paper's tables: tiny layers in the real models' proportions, cells, and its page."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import fork_ranks
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paper import tables as paper_tables
from benchmarks.paper.cells import Cell, all_cells
from benchmarks.paper.models import MODELS, Model, build, microbatch
from benchmarks.paper.predicting import PAPER
from benchmarks.paper.trainings import setup, start
from benchmarks.shared.files import ROOT
from tf_adapters.schedule.orders import named_schedule
from tf_adapters.simulate.model_costs import LLAMA_1B, LLAMA_8B, LLAMA_13B, split_layers, stage_costs
from tf_adapters.testing import force_plan
from tf_adapters.testing.emulated_device import EmulatedDevice


def counted(model: Model, first: int, last: int) -> float:
    """FLOPs of a forward of the tiny layers, by torch's counter."""
    x = microbatch(model, 0)[0] if first == 0 else torch.zeros(8, 32)
    with FlopCounterMode(display=False) as counter:
        torch.nn.Sequential(*build(model, first, last))(x)
    return float(counter.get_total_flops())


@pytest.mark.parametrize(("name", "shape"), [("1B", LLAMA_1B), ("8B", LLAMA_8B), ("13B", LLAMA_13B)])
@pytest.mark.parametrize("stages", [4, 6, 8])
def test_stages_have_the_real_models_shares(name, shape, stages):
    model, cuts = MODELS[name], MODELS[name].boundaries(stages)
    layers = split_layers(shape.num_hidden_layers, stages)
    real = [cost.forward for cost in stage_costs(shape, layers, 1, 1024)]
    tiny = [counted(model, first, last) for first, last in pairwise(cuts)]
    for of_tiny, of_real in zip(tiny, real, strict=True):
        assert of_tiny / sum(tiny) == pytest.approx(of_real / sum(real), rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_a_backward_without_weight_gradients_is_as_long_as_a_forward(name):
    model = MODELS[name]
    layers = torch.nn.Sequential(*build(model, 3, 6)).requires_grad_(False)
    x = torch.zeros(8, 32, requires_grad=True)
    forward = counted(model, 3, 6)
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * forward, rel=0.05)  # attention's is twice its forward


def test_convnexts_partitions_are_uneven_in_different_ways():
    model = MODELS["ConvNeXt"]
    assert sum(layer.parameters for layer in model.layers) == pytest.approx(196e6, rel=0.02)  # 198 published
    shares = {}
    for partition in ("memory", "parameter", "time"):
        cuts = model.boundaries(4, partition, [8] * 4)
        assert len(cuts) == 5
        assert cuts[0] == 0
        assert cuts[-1] == len(model.layers)
        shares[partition] = [sum(layer.forward for layer in model.layers[a:b]) for a, b in pairwise(cuts)]
    assert shares["parameter"][0] == max(shares["parameter"])  # early blocks have few parameters
    assert shares["memory"][0] == min(shares["memory"])  # and large activations
    assert max(shares["time"]) < 1.1 * min(shares["time"])


def test_cells_have_names_of_their_own_and_their_hosts_stages():
    cells = all_cells()
    assert len({str(cell) for cell in cells}) == len(cells)
    for cell in cells:
        assert len(cell.boundaries) == cell.stages + 1
        assert all(first < last for first, last in pairwise(cell.boundaries))
        order = {"gpipe": "gpipe", "1f1b": "one_f_one_b"}.get(cell.schedule, cell.schedule)
        ranks = named_schedule(order, cell.ranks, cell.microbatches).ranks
        assert [tuple(sorted({action.stage for action in rank})) for rank in ranks] == cell.stages_of_rank


def test_the_papers_figures_are_those_that_are_predicted_for():
    of_orders = {"one_f_one_b": "1f1b"}
    for (model, schedule), figures in PAPER.items():
        cell = Cell("torch", model, of_orders.get(schedule, schedule), 4)
        assert cell.paper == pytest.approx((figures.gain, figures.freeze_ratio), abs=0.05)
    assert Cell("torch", "ViT", "gpipe", 8).paper == pytest.approx((28.1, 50.0), abs=0.1)
    assert Cell("torch", "8B", "1f1b", 8).paper is None


def test_a_gain_over_the_run_lies_between_none_and_that_of_stable_freezing():
    cell = Cell("torch", "8B", "gpipe", 4)
    assert paper_tables.over_run(cell, 1.0, 1.0) == pytest.approx(0.0)
    over_run = paper_tables.over_run(cell, 0.69, 0.66)
    assert 37.0 < over_run < 100.0 * (1.0 / 0.69 - 1.0)  # 45% in 87% of the steps


ROW = {
    "unfrozen_ms": 1400.0,
    "stable_ms": 1010.0,
    "forecast_unfrozen_ms": 1400.0,
    "planned_ms": 1000.0,
    "fully_frozen": 0.67,
    "freeze_ratio": 0.5,
    "emulation_error": 0.004,
    "seconds": 30.0,
}


def test_page_and_picture_come_from_the_cells_that_are_there(tmp_path, monkeypatch):
    rows = {str(cell): ROW for cell in all_cells()[::4]}
    monkeypatch.setattr(paper_tables, "PICTURE", tmp_path / "paper_tables.png")
    text = paper_tables.generated(rows)
    assert text.count("\n| ") == len(rows) + 1
    assert f"{len(rows)} of {len(all_cells())} cells" in text
    assert "| 36.3% |" in text
    assert "| 1.010 |" in text
    assert "mulated" in text
    paper_tables.draw(rows)
    assert paper_tables.PICTURE.stat().st_size > 10_000


def test_the_page_shows_the_committed_cells():
    rows = paper_tables.read_rows()
    page = (ROOT / "docs" / "paper_tables.md").read_text()
    made = page.split("`python -m benchmarks.paper.tables` -->\n")[1].split("<!-- end of paper_tables -->")[0]
    assert made.strip() == (paper_tables.generated(rows) if rows else "")
    assert paper_tables.PICTURE.exists() == bool(rows)


def train(cell: Cell, ratio: float) -> dict[str, Any]:
    """Two steps with a plan of our choosing, on emulated devices."""
    with EmulatedDevice(1e12) as device:
        training = start(cell, {"goal": "paper", "on_error": "raise", "output_dir": "runs/tests"})
        controller = training.adapter.controller
        force_plan(controller, ratio)
        for _ in range(2):
            training.step()
        masks = [[controller.frozen_parameters(controller.step, s, m) for m in range(2)] for s in range(cell.stages)]
        order, failure = controller.schedule.to_text(), controller.state.failure
        training.adapter.detach()
    return {"order": order, "failure": failure, "masks": masks, "operations": device.operations}


@pytest.mark.programs
@pytest.mark.parametrize(
    "cell",
    [
        Cell("torch", "1B", "zbv", 4),
        Cell("deepspeed", "ViT", "gpipe", 4),
        Cell("megatron-core", "1B", "interleaved", 4),
    ],
    ids=str,
)
def test_a_cell_runs_on_its_hosts_engine(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with fork_ranks(cell.ranks, functools.partial(setup, cell.host)) as pool:
        ranks = pool.run(train, cell, 0.5)
    assert {rank["failure"] for rank in ranks} == {None}
    assert all(rank["order"] == ranks[0]["order"] for rank in ranks)
    assert all(rank["masks"] == ranks[0]["masks"] for rank in ranks)
    assert any(names for of_stage in ranks[0]["masks"] for names in of_stage)
