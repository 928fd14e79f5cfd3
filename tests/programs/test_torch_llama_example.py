"""The torch_llama example: cut models equal whole ones, and ``torchrun`` on two ranks with freezing and without."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import PHASES, SAVED_AT, STEPS, freezing, held_out, load_example, losses, said
from launching import ROOT, torchrun
from rank_pools import fork_ranks

from tf_adapters.testing import RankPool

pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "torch_llama"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
TINY = ("--layers", 5, "--width", 16, "--heads", 2, "--context", 8, "--microbatches", 4, "--log-every", 1)
# --- the parts, in one process -------------------------------------------------------------------------------

layout, models, stages, data = (
    load_example(f"torch_llama/{name}.py") for name in ("layout", "models", "stages", "data")
)
text = load_example("text.py")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_are_refused_exactly_where_torch_refuses_them(schedule: str) -> None:
    from tf_adapters.errors import ScheduleError
    from tf_adapters.schedule.orders import named_schedule

    name = {"1f1b": "one_f_one_b"}.get(schedule, schedule)
    for ranks in (1, 2, 3, 4):
        for microbatches in range(1, 14):
            try:
                theirs = named_schedule(name, ranks, microbatches)
                if schedule == "1f1b" and microbatches < ranks:
                    raise ScheduleError("torch's class asks for as many microbatches as stages; our generator does not")
            except ScheduleError:
                with pytest.raises(ValueError, match=f"microbatches is {microbatches}: {schedule} on {ranks} ranks "):
                    layout.Layout(schedule, ranks, 8, microbatches)
            else:
                ours = layout.Layout(schedule, ranks, 8, microbatches)
                for rank, actions in enumerate(theirs.ranks):
                    assert {action.stage for action in actions} == set(ours.stages_of(rank))


def test_a_rank_may_have_more_than_two_looped_stages() -> None:
    cut = layout.Layout("interleaved", 2, 8, 4, looped=4)
    assert [cut.stages_of(rank) for rank in range(2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [layer for stage in range(cut.stages) for layer in cut.layers_of(stage)] == list(range(8))


def test_every_layer_is_in_one_stage_and_shares_differ_by_one_at_most() -> None:
    for layers in range(4, 14):
        cut = layout.Layout("zbv", 2, layers, 4)
        shares = [cut.layers_of(stage) for stage in range(cut.stages)]
        assert [layer for share in shares for layer in share] == list(range(layers))
        assert {len(share) for share in shares} <= {layers // 4, layers // 4 + 1}


def test_the_split_model_has_the_whole_models_loss_and_gradients() -> None:
    config = models.new_config(layers=5, width=16, heads=4, context=8, vocabulary=32)
    config.num_key_value_heads = 2
    whole, cut = models.build(config), models.build(config)
    tokens, labels = torch.randint(32, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    expected = whole(tokens, labels=labels, shift_labels=labels).loss
    expected.backward()

    plan = layout.Layout("zbv", 2, 5, 4)
    parts = [stages.LlamaStage(cut, plan.layers_of(stage)) for stage in range(4)]
    hidden = tokens
    for part in parts:
        hidden = part(hidden)
    loss = stages.loss_fn(hidden, labels)
    loss.backward()

    assert loss.item() == expected.item()
    names = [name for part in parts for name, _ in part.named_parameters()]
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert sorted(names) == sorted(gradients)
    for part in parts:
        for name, p in part.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-6, atol=1e-9)


def test_tied_embeddings_part_with_equal_weights(tmp_path: Path) -> None:
    config = models.new_config(layers=1, width=8, heads=2, context=8, vocabulary=16)
    config.tie_word_embeddings = True
    models.build(config).to(torch.bfloat16).save_pretrained(tmp_path)
    whole = models.build(models.config_in(tmp_path), tmp_path)
    assert whole.lm_head.weight is not whole.model.embed_tokens.weight
    assert whole.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(whole.lm_head.weight, whole.model.embed_tokens.weight)


def test_batches_depend_on_seed_and_number_only() -> None:
    tokens = data.encode(bytes(range(200)))
    batches = data.Batches(tokens, context=8, windows=3)
    for mine, again, other in zip(batches[5], data.Batches(tokens, 8, 3)[5], batches[6], strict=True):
        assert torch.equal(mine, again)
        assert not torch.equal(mine, other)
    inputs, labels = batches[5]
    assert torch.equal(labels, inputs + 1)


# --- the script under torchrun, as its README starts it ------------------------------------------------------


@pytest.mark.programs
def test_it_learns_through_all_phases_and_its_model_can_be_loaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    more = ("--steps", STEPS, "--lr", 0.02, "--eval-every", 7, "--save", folder)
    code, output = train(*TINY, *more, *freezing(tmp_path))
    assert code == 0, output
    check_phases(output, tmp_path, ["0", "1"])
    found = [float(loss) for loss in losses(output).values()]
    assert len(found) == STEPS
    assert found[-1] < found[0] - 1
    evaluated = held_out(output)
    assert len(evaluated) == 3
    assert evaluated == sorted(evaluated, reverse=True)

    loaded = models.LlamaForCausalLM.from_pretrained(folder)
    _, held_out_text = text.split(text.load_text("topics"))
    batches = data.Batches(data.encode(held_out_text), context=8, windows=16)
    assert evaluated[-1] == pytest.approx(mean_loss(loaded, batches, stages.loss_fn), abs=2e-6)


def mean_loss(whole: Any, batches: Any, loss_fn: Any, count: int = 4) -> float:
    """A whole model's loss on the first few batches; the example takes four, too."""
    with torch.no_grad():
        found = [
            loss_fn(whole(tokens).logits, labels).item() for tokens, labels in map(batches.__getitem__, range(count))
        ]
    return sum(found) / count


def train(*arguments: object) -> tuple[int, str]:
    return torchrun("examples/torch_llama/train.py", *arguments)


def check_phases(output: str, folder: Path, stage_names: list[str]) -> None:
    """All phases were gone through, and the report is there."""
    assert [line for line in said(output) if line.startswith("step ")] == PHASES
    report = json.loads((folder / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"
    assert report["host"]["name"] == "torch.distributed.pipelining"
    assert sorted(report["measured"]["mean_afr"]) == stage_names


# --- the script's parts, on ranks that run already -----------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with fork_ranks(2, prepare_rank) as pool:
        yield pool


def prepare_rank() -> None:
    sys.path[:0] = [str(ROOT / "examples"), str(EXAMPLE)]


@pytest.mark.programs
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_process_does(ranks: RankPool, schedule: str) -> None:
    """Also the held-out losses, which torch's own ``eval()`` does not compute for V-shaped schedules."""
    found = ranks.run(train_whole_and_split, schedule)
    (split,) = [losses for _, losses in found if losses]
    for whole, _ in found:
        assert split == pytest.approx(whole, rel=1e-5)


def train_whole_and_split(schedule: str) -> tuple[list[float], list[float]]:
    """On a rank: losses of a whole model, and those of the pipeline, if this rank has them."""
    import train

    args = train.parse_args([*map(str, TINY), "--schedule", schedule])
    training, held_out_batches = train.data(args, None)
    trainer = trainer_of(args)
    split = []
    for number in range(2):
        split += [trainer.step(training[number]), trainer.evaluate(held_out_batches)]
    whole = whole_losses(train.models.build(args.config), training, held_out_batches)
    return whole, [loss.item() for loss in split if loss is not None]


def whole_losses(whole: Any, training: Any, held_out_batches: Any) -> list[float]:
    from pipeline import WEIGHT_DECAY
    from stages import loss_fn

    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3, weight_decay=WEIGHT_DECAY)
    found = []
    for number in range(2):
        tokens, labels = training[number]
        optimizer.zero_grad()
        loss = loss_fn(whole(tokens).logits, labels)
        loss.backward()
        optimizer.step()
        found += [loss.item(), mean_loss(whole, held_out_batches, loss_fn)]
    return found


def trainer_of(args: Any) -> Any:
    import models
    from pipeline import Trainer

    return Trainer(args.layout, models.build(args.config), torch.device("cpu"), args.lr, args.bf16)


@pytest.mark.programs
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_gradients_under_masks(ranks: RankPool, tmp_path: Path, schedule: str, precision: str) -> None:
    bf16 = ["--bf16"] if precision == "bf16" else []
    for worst in ranks.run(worst_error, ["--schedule", schedule, *bf16], tmp_path):
        assert worst < (2e-2 if bf16 else 1e-5)


def worst_error(arguments: list[str], folder: Path) -> float:
    """On a rank: how far its gradients are from those of the whole model, masked and averaged."""
    import train
    from stages import LlamaStage, loss_fn
    from torch_ranks import force_plan

    from tf_adapters.testing import masked_gradients, relative_error

    args = train.parse_args([*map(str, TINY), *arguments, *freezing(folder)])
    trainer = trainer_of(args)
    freezer = train.attach(trainer.schedule, args.freezing, optimizer=trainer.optimizers)
    force_plan(freezer.controller, 0.5)
    names = freezer.controller.frozen_parameters
    step = freezer.controller.step
    masks = [{n for s in range(args.layout.stages) for n in names(step, s, m)} for m in range(args.microbatches)]
    assert all(masks)
    tokens, labels = train.data(args, None)[0][0]
    trainer.step((tokens, labels))
    freezer.detach()

    reference = LlamaStage(train.models.build(args.config), range(args.config.num_hidden_layers), args.bf16)
    microbatches = zip(tokens.chunk(args.microbatches), labels.chunk(args.microbatches), strict=True)
    expected = masked_gradients(reference, microbatches, loss_fn, masks.__getitem__)
    found = {name: p for stage in trainer.stages.values() for name, p in stage.named_parameters()}
    return max(
        relative_error(torch.zeros_like(p) if p.grad is None else p.grad, expected[name]) for name, p in found.items()
    )


@pytest.mark.programs
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_resumed_run_has_the_losses_of_one_that_went_on(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    arguments = ("--schedule", schedule, "--steps", STEPS, *freezing(tmp_path))
    straight = output_of(ranks, *TINY, *arguments, "--save-state", tmp_path, "--save-every", SAVED_AT)
    check_phases(straight, tmp_path, ["0", "1"] if schedule == "1f1b" else ["0", "1", "2", "3"])
    resumed = output_of(ranks, *TINY, *arguments, "--resume", tmp_path / f"step_{SAVED_AT}")
    assert f"timely_freeze: resumed after step {SAVED_AT}: stable freezing" in resumed
    assert losses(resumed) == {step: loss for step, loss in losses(straight).items() if step > SAVED_AT}
    assert held_out(resumed) == held_out(straight)


@pytest.mark.programs
def test_a_run_goes_on_under_another_schedule_and_its_model_trains_on(ranks: RankPool, tmp_path: Path) -> None:
    state, model = tmp_path / "state", tmp_path / "model"
    first = output_of(ranks, *TINY, "--schedule", "1f1b", "--steps", 3, "--save-state", state, "--save", model)
    more = freezing(tmp_path, **{"warmup-steps": 0, "monitoring-steps": 2, "progressive-steps": 0})
    other = output_of(
        ranks, *TINY, "--schedule", "dualpipev", "--steps", 6, "--resume", state / "step_3", *more, "--bf16"
    )
    assert list(losses(other)) == [4, 5, 6]
    assert "step 3: stable freezing" in other
    sizes = TINY[TINY.index("--context") :]
    again = output_of(ranks, *sizes, "--checkpoint", model, "--lr", 0, "--steps", 1)
    assert held_out(again) == held_out(first)


def output_of(ranks: RankPool, *arguments: object) -> str:
    """What all ranks print together."""
    return "".join(ranks.run(run_script, [*map(str, arguments)]))


def run_script(arguments: list[str]) -> str:
    import train

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        train.run(train.parse_args(arguments), torch.device("cpu"))
    return said.getvalue()


REFUSED = {
    "--timely-freeze-seed 3": (
        "--timely-freeze-seed is 3, but --timely-freeze is not given: give it, or leave --timely-freeze-seed out"
    ),
    "--schedule 1f1b --microbatches 1": "microbatches is 1: 1f1b on 2 ranks needs at least 2",
    "--schedule dualpipev --microbatches 3": "microbatches is 3: dualpipev on 2 ranks needs at least 4",
    "--schedule interleaved --microbatches 5": (
        "microbatches is 5: interleaved on 2 ranks makes 2 equal rounds of them"
    ),
    "--schedule zbv --layers 3": "layers is 3: zbv on 2 ranks has 4 stages, each with a layer at least",
    "--width 18": "width is 18: it must be a multiple of 4, two for each head",
    "--checkpoint runs": "--layers is given, but the model in --checkpoint has sizes of its own: leave it out",
    "--micro-batch 0": "argument --micro-batch: 0 is not at least 1",
    "--no-such-option": "unrecognized arguments: --no-such-option",
}


@pytest.mark.programs
def test_each_bad_argument_is_one_line(ranks: RankPool, tmp_path: Path) -> None:
    for refused in ranks.run(refusals, list(REFUSED)):
        assert refused == [(2, f"train.py: error: {line}\n") for line in REFUSED.values()]


def refusals(lines: list[str]) -> list[tuple[Any, str]]:
    """On a rank: how the script exits for each line of arguments, and what it says."""
    import train

    found = []
    sys.argv = ["train.py"]
    for line in lines:
        said = io.StringIO()
        with redirect_stderr(said), pytest.raises(SystemExit) as caught:
            train.parse_args([*map(str, TINY), *line.split()])
        found.append((caught.value.code, said.getvalue()))
    return found


@pytest.mark.programs
def test_a_state_that_is_not_there_or_of_another_model_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for missing, other in ranks.run(wrong_states, tmp_path):
        assert missing == f"no saved training in {tmp_path / 'nowhere'}"
        assert re.fullmatch(rf"the training in {tmp_path} is of another model: \S+ is .* there, .* here", other)


def wrong_states(folder: Path) -> list[str]:
    """On a rank: why going on from a folder was refused."""
    import checkpoints
    import train

    narrow, wide = (trainer_of(train.parse_args([*map(str, TINY), "--width", width])) for width in ("16", "32"))
    checkpoints.save(folder, narrow, None)
    found = []
    for where in (folder / "nowhere", folder):
        with pytest.raises(SystemExit) as caught:
            checkpoints.load(where, wide, None)
        found.append(str(caught.value))
    return found
