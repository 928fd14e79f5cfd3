"""The cost model against sums done by hand and published sizes; the paper's 8B gains, predicted."""

from __future__ import annotations

import pytest
from schedules import one_f_one_b, split_one_f_one_b

from benchmarks.paper import predicted, predicting
from benchmarks.paper.variants import CostOptions, Variant
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.simulate.model_costs import (
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_13B,
    LlamaShape,
    StageCost,
    action_bounds,
    split_layers,
    stage_costs,
)

# Weights of a layer: q, o 8 x 8 each; k, v 4 x 8 each (2 heads of 4, 1 for keys); gate, up, down 8 x 10 each.
TINY = LlamaShape(4, 8, 2, 1, 10, 50)
LAYER_WEIGHTS = 2 * 64 + 2 * 32 + 3 * 80
TOKENS, LENGTH = 6, 3


def tiny(layers: tuple[int, ...], **options: float) -> tuple[StageCost, ...]:
    return CostOptions(**options).costs(TINY, layers, 2, LENGTH)


def parameters(shape: LlamaShape, ends: int) -> int:
    """All elements; ``ends`` is 1 if the head is the embedding, else 2."""
    norms = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    return shape.num_hidden_layers * shape.layer_weights + norms + ends * shape.embedding_weights


@pytest.mark.parametrize(
    ("shape", "ends", "elements", "model_card"),
    [
        (LLAMA_1B, 1, 1_235_814_400, 1.23e9),
        (LLAMA_8B, 2, 8_030_261_248, 8.03e9),
        (LLAMA_13B, 2, 13_015_864_320, 13.0e9),
    ],
)
def test_parameters_are_the_published_ones(shape: LlamaShape, ends: int, elements: int, model_card: float) -> None:
    assert parameters(shape, ends) == elements == pytest.approx(model_card, rel=0.005)


def test_a_layer_by_hand() -> None:
    assert TINY.layer_weights == LAYER_WEIGHTS == 432
    (middle,) = tiny((0, 1, 0))[1:2]
    linear = 2 * TOKENS * LAYER_WEIGHTS  # 5184
    scores = 4 * TOKENS * LENGTH * 8 / 2  # two products over half of the scores: 288
    assert middle == StageCost(linear + scores, linear + 2.5 * scores, linear) == StageCost(5472, 5904, 5184)


def test_the_ends_by_hand() -> None:
    first, last = tiny((0, 0))
    assert first == StageCost(0, 0, 6 * 8)
    assert last == StageCost(4800, 4800, 4800)  # 2 * 6 tokens * 50 * 8
    assert tiny((0, 0), head=False)[1] == StageCost(0, 0, 0)


def test_recomputation_is_a_forward_more_in_the_input_gradient() -> None:
    plain, again = tiny((0, 2, 0))[1], tiny((0, 2, 0), recompute=0.5)[1]
    assert again == StageCost(plain.forward, plain.input_grad + 0.5 * plain.forward, plain.weight_grad)


def test_attention_has_no_weight_gradient() -> None:
    causal, full = tiny((0, 1, 0))[1], tiny((0, 1, 0), attention_share=1.0)[1]
    assert (full.forward - causal.forward, full.input_grad - causal.input_grad) == (288, 720)
    assert full.weight_grad == causal.weight_grad


def test_memory_traffic_counts_at_the_machines_balance() -> None:
    bytes_ = {"loss_forward_bytes": 14.0, "loss_backward_bytes": 22.0, "weight_gradient_bytes": 18.0}
    plain, slow = tiny((0, 0))[1], tiny((0, 0), **bytes_, flops_per_byte=10.0)[1]
    assert slow.forward - plain.forward == 6 * 50 * 14 * 10
    assert slow.input_grad - plain.input_grad == 6 * 50 * 22 * 10
    assert slow.weight_grad - plain.weight_grad == 50 * 8 * 18 * 10
    assert tiny((0, 0), **bytes_)[1] == plain


def test_a_whole_model_costs_six_flops_a_weight_and_token() -> None:
    """The usual 6 N a token without the embedding, and for attention 0.5 * 4 * (1 + 2.5) * length * width a layer."""
    tokens = 2 * 1024
    total = sum(c.forward + c.input_grad + c.weight_grad for c in stage_costs(LLAMA_8B, (8, 9, 8, 7), 2, 1024))
    weights = parameters(LLAMA_8B, ends=1)  # without the embedding
    attention = 32 * 7 * 1024 * 4096
    assert total == pytest.approx(tokens * (6 * weights + attention), rel=1e-4)


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "expected"),
    [
        (32, 4, 1, (8, 9, 8, 7)),
        (32, 4, 0, (8, 8, 8, 8)),
        (16, 4, 1, (4, 5, 4, 3)),
        (40, 4, 1, (10, 11, 10, 9)),
        (32, 8, 1, (4, 5, 4, 4, 4, 4, 4, 3)),
        (3, 2, 2, (2, 1)),  # TorchTitan's own example
        (5, 1, 1, (5,)),
        (10, 4, 0, (3, 3, 2, 2)),
    ],
)
def test_layers_are_split_as_torchtitan_does(layers: int, stages: int, ends: int, expected: tuple[int, ...]) -> None:
    assert split_layers(layers, stages, ends) == expected
    assert sum(expected) == layers


def test_ends_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 layers on 4 stages: too few"):
        split_layers(1, 4, ends=2)


def test_bounds_of_whole_and_split_backwards() -> None:
    costs = (StageCost(10.0, 20.0, 30.0), StageCost(11.0, 22.0, 33.0))
    whole = action_bounds(one_f_one_b(2, 2), costs, flops_per_ms=10.0)
    assert whole[Action.parse("1F0")] == Bounds(1.1, 1.1)
    assert whole[Action.parse("1B1")] == Bounds(2.2, 5.5)
    assert whole[Action.parse("0B0")] == Bounds(2.0, 5.0)
    gone = Variant(first_stage_disappears=True).bounds(whole)
    assert gone[Action.parse("0B0")] == Bounds(0.0, 5.0)
    assert gone[Action.parse("1B0")] == Bounds(2.2, 5.5)
    split = action_bounds(split_one_f_one_b(2, 2), costs, 10.0)
    assert split[Action.parse("1I0")] == Bounds(2.2, 2.2)
    assert split[Action.parse("1W0")] == Bounds(0.0, 3.3)
    assert split[Action.parse("0I0")] == Bounds(0.0, 0.0)
    assert split[Action.parse("0W0")] == Bounds(2.0, 5.0)


@pytest.mark.parametrize(("schedule", "paper"), [("gpipe", 36.3), ("one_f_one_b", 36.9)])
def test_the_papers_8b_gains_are_predicted_within_four_points(schedule: str, paper: float) -> None:
    found = predicting.predict("8B", schedule)
    assert found.plan_gain == pytest.approx(paper, abs=4.0)
    assert found.run_gain == pytest.approx(paper, abs=4.0)


def test_every_row_that_is_off_says_why() -> None:
    for model, schedule in predicting.PAPER:
        off = abs(predicting.predict(model, schedule).run_gain - predicting.PAPER[model, schedule].gain)
        assert (off > predicted.WITHIN) == ((model, schedule) in predicted.NOTES), (model, schedule, off)


def test_the_papers_gains_are_those_of_its_throughputs() -> None:
    for row in predicting.PAPER.values():
        assert predicting.gain(row.timely, row.unfrozen) == pytest.approx(row.gain, abs=0.1)


def test_a_run_frozen_at_the_budget_has_the_papers_13b_freeze_ratio() -> None:
    assert predicting.frozen_share(predicting.MODELS["13B"], 1.0) == pytest.approx(0.722, abs=0.002)
