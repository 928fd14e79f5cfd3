"""Sampled tokens: chances, draws, what a sample costs, and which ratio leaves time for how many tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.measuring.timer import ActionTimer
from tf_adapters.measuring.token_cost import TokenCost, measured_token_cost, slower_cost
from tf_adapters.schedule.ir import Action
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.weight_gradients.tokens import TokenSampler, common_input, draw, inclusion_chances

SIZES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=2, max_size=40)


def sampled(key: tuple[int, ...], kept: float, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    rows, gradients = TokenSampler(key, lambda _: kept).rows("weight", inputs, gradient)
    return gradients.t() @ rows


@given(SIZES, st.data())
def test_chances_add_up_to_the_count_and_are_in_proportion_below_one(sizes: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes) - 1))
    given_sizes = torch.tensor(sizes)
    chances = inclusion_chances(given_sizes, count)
    assert ((chances >= 0) & (chances <= 1)).all()
    assert float(chances.sum()) == pytest.approx(min(count, sum(size > 0 for size in sizes)), rel=1e-6)
    partial = (chances > 0) & (chances < 1 - 1e-9)
    factors = chances[partial] / given_sizes.double()[partial]
    assert torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-6)
    if partial.any():
        assert (given_sizes[~partial & (chances > 0)] >= given_sizes[partial].max()).all()


@given(SIZES, st.floats(0, 1, exclude_max=True), st.data())
def test_a_draw_takes_each_token_once_and_the_certain_ones_always(
    sizes: list[float], offset: float, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes) - 1))
    chances = inclusion_chances(torch.tensor(sizes), count)
    chosen, scales = draw(chances, count, offset)
    assert len(chosen) == count
    if sum(size > 0 for size in sizes) < count:
        assert torch.equal(torch.zeros(len(sizes)).double().index_add_(0, chosen, scales), chances.round())
        return
    certain = (chances > 1 - 1e-9).nonzero().flatten().tolist()
    assert len(set(chosen.tolist()) | set(certain)) <= count + 1  # rounding may move the last one
    assert torch.allclose(scales[chances[chosen] > 0], 1 / chances[chosen][chances[chosen] > 0])


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("common", [0.0, 2.0])
def test_the_mean_of_many_draws_is_the_whole_gradient(kept: float, common: float) -> None:
    torch.manual_seed(0)
    inputs = common + torch.randn(48, 8) * torch.rand(48, 1) ** 3
    inputs[::6] = 0.0  # as padding may be
    gradient = torch.randn(48, 6) * torch.rand(48, 1)
    whole = gradient.t() @ inputs
    errors = torch.stack([sampled((0, step, 1, 2), kept, inputs, gradient) - whole for step in range(3_000)])
    standard_error = errors.std(0) / len(errors) ** 0.5
    assert (errors.mean(0).abs() <= 5 * standard_error + 1e-5).all()


@pytest.mark.parametrize("last", [False, True], ids=["first tokens", "last token"])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_few_tokens_with_a_gradient_give_the_whole_gradient(common: float, last: bool) -> None:
    torch.manual_seed(0)
    inputs, gradient = torch.randn(64, 6) + common, torch.zeros(64, 5)
    gradient[[63] if last else [1, 5, 9]] = torch.randn(1 if last else 3, 5)
    for seed in range(20):
        rows, gradients = TokenSampler((seed,), lambda _: 0.25).rows("weight", inputs, gradient)
        torch.testing.assert_close(gradients.t() @ rows, gradient.t() @ inputs, rtol=1e-5, atol=1e-5)


def test_tokens_drawn_by_their_size_are_nearer_to_the_whole_than_tokens_drawn_evenly() -> None:
    torch.manual_seed(0)
    inputs, gradient = torch.randn(64, 8), torch.randn(64, 6) * torch.rand(64, 1) ** 4
    whole = gradient.t() @ inputs
    by_size = sum(float((sampled((n,), 0.25, inputs, gradient) - whole).norm() ** 2) for n in range(300))
    evenly = 0.0
    for n in range(300):
        chosen, scales = draw(torch.full((64,), 0.25, dtype=torch.float64), 16, (n + 0.5) / 300)
        evenly += float(((gradient[chosen] * scales[:, None].float()).t() @ inputs[chosen] - whole).norm() ** 2)
    assert by_size < 0.6 * evenly


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_all_inputs_have_in_common_is_not_left_to_the_draw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, gradient = torch.randn(8).expand(64, 8).to(dtype), torch.randn(64, 6).to(dtype)
    whole = gradient.double().t() @ inputs.double()
    error = (sampled((0,), 0.25, inputs, gradient).double() - whole).norm() / whole.norm()
    assert error < 16 * torch.finfo(dtype).eps


@given(st.integers(0, 2**32), st.floats(0, 1e4), st.floats(0, 3))
def test_a_common_input_leaves_no_more_to_the_draw_than_none(seed: int, outlier: float, common: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = common + torch.randn(300, 8, generator=generator)
    inputs[0] *= outlier  # some layers of language models have one token whose input is a thousand times as large
    gradient = torch.randn(300, 6, generator=generator) * torch.rand(300, 1, generator=generator)
    alone = gradient.norm(dim=1) * inputs.norm(dim=1)
    direction, sizes = common_input(inputs, gradient)
    assert float(sizes.square().sum()) <= float(alone.square().sum()) * 1.02  # each is at least a tenth of its own
    exact = gradient.norm(dim=1) * (inputs - direction).norm(dim=1)
    assert torch.allclose(sizes, torch.maximum(exact, 0.1 * alone), rtol=1e-2, atol=1e-4 * float(alone.max()))


def test_the_work_is_that_of_the_kept_tokens() -> None:
    inputs, gradient = torch.randn(40, 4), torch.randn(40, 3)
    rows, gradients = TokenSampler((0,), lambda _: 0.3).rows("weight", inputs, gradient)
    assert rows.shape == (12, 4)
    assert gradients.shape == (12, 3)
    assert TokenSampler((0,), lambda _: 1.0).rows("weight", inputs, gradient)[0] is inputs
    assert TokenSampler((0,), lambda _: 1e-9).rows("weight", inputs, gradient)[0].shape == (2, 4)


def test_half_precision_inputs_that_are_large_do_not_overflow() -> None:
    inputs = torch.full((16, 1024), 10.0, dtype=torch.float16)  # their products with one another do
    common, sizes = common_input(inputs, torch.ones(16, 4, dtype=torch.float16))
    assert sizes.isfinite().all()
    assert torch.allclose(common, torch.full((1024,), 10.0), rtol=1e-2)


def test_no_gradient_stays_none_and_an_overflow_stays_one() -> None:
    inputs, zeros = torch.randn(10, 4), torch.zeros(10, 3)
    assert (sampled((0,), 0.3, inputs, zeros) == 0).all()
    for broken in (torch.inf, torch.nan):
        gradient = torch.randn(10, 3)
        gradient[4, 1] = broken
        assert not torch.isfinite(sampled((0,), 0.3, inputs, gradient)).all()
    assert sampled((0,), 0.3, torch.empty(0, 4), torch.empty(0, 3)).shape == (3, 4)


def test_half_precision_is_drawn_in_single_precision() -> None:
    inputs = torch.full((16, 4), 300.0, dtype=torch.float16)
    gradient = torch.full((16, 3), 300.0, dtype=torch.float16)  # norms whose square half precision does not hold
    rows, gradients = TokenSampler((0,), lambda _: 0.5).rows("weight", inputs, gradient)
    assert rows.dtype == gradients.dtype == torch.float16
    assert torch.isfinite(rows).all()
    assert torch.isfinite(gradients).all()


def test_masks_name_no_parameter_and_their_share_is_the_ratio() -> None:
    units = {0: [FreezeUnit(("a",), 3.0, (3,)), FreezeUnit(("b",), 1.0, (1,), cap=0.0)], 1: []}
    masks = StageMasks(units, seed=0, tokens=True)
    drawn = masks.draw(step=1, stage=0, ratios=(0.0, 0.5, 1.0))
    assert [(mask.names, mask.share, mask.complete) for mask in drawn] == [((), r, False) for r in (0.0, 0.5, 1.0)]
    assert masks.caps(0) == {"a": 1.0}  # b is no linear layer's
    assert masks.excludes[0]
    assert [mask.share for mask in masks.draw(step=1, stage=1, ratios=(0.5,))] == [0.0]


def test_a_ratio_leaves_time_for_fewer_tokens_where_drawing_takes_time() -> None:
    free, dear = TokenCost(), TokenCost(fixed=0.1, per_token=1.0)
    assert free.kept(0.0) == dear.kept(0.0) == 1.0
    assert free.kept(0.6) == pytest.approx(0.4)
    assert dear.kept(0.6) == pytest.approx(0.3)
    assert dear.fixed + dear.per_token * dear.kept(dear.most_frozen) == pytest.approx(1 - dear.most_frozen)
    assert dear.kept(1.0) > 0.0
    assert TokenCost(fixed=2.0).most_frozen == 0.0


class Stepping:
    """A clock of moments that the test makes."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start

    def synchronize(self) -> None:
        return None


def backward(timer: ActionTimer, clock: Stepping, phase: str, share: float, pace: float, cost: TokenCost) -> None:
    left = 1.0 if not share else cost.fixed + cost.per_token * TokenCost().kept(share)
    with timer.timed(phase, Action.parse("0B0"), share):
        clock.now += 10 * pace
        timer.input_gradients_done()
        clock.now += 20 * pace * left


@pytest.mark.parametrize("cost", [TokenCost(0.12, 0.95), TokenCost(0.0, 1.0), TokenCost(0.4, 1.3)])
def test_the_cost_is_measured_whatever_the_pace_of_the_steps(cost: TokenCost) -> None:
    clock = Stepping()
    timer = ActionTimer(clock)
    for pace in (1.0, 1.0, 1.0):
        backward(timer, clock, "monitoring_upper", 0.0, pace=pace, cost=cost)
    for turn, pace in enumerate((1.0, 1.4, 0.8, 1.1, 3.0, 0.9)):
        backward(timer, clock, "monitoring_mixed", turn / 5, pace=pace, cost=cost)
    timer.drain()
    measured = measured_token_cost(timer, {Action.parse("0B0"): 30.0})
    assert measured is not None
    assert (measured.fixed, measured.per_token) == pytest.approx((cost.fixed, cost.per_token), abs=1e-6)


def test_a_stage_is_as_slow_as_its_slowest_replica() -> None:
    assert slower_cost(TokenCost(0.1, 1.0), TokenCost(0.2, 0.9)) == TokenCost(0.2, 1.0)


@pytest.mark.parametrize("method", ["timely+apf", "timely+autofreeze", "apf", "autofreeze"])
def test_methods_that_choose_tensors_are_refused_with_tokens(method: str) -> None:
    with pytest.raises(ConfigError, match=r'granularity is "token" and .*method is "' + method.replace("+", r"\+")):
        TimelyFreezeConfig(granularity="token", method=method)
