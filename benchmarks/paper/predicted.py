"""The paper's tables, predicted by the planner: nothing here is measured. Seconds on one core.

Prints the tables and their reading; writes results/paper/predicted.json and docs/predicted.md.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.paper.predicting import (
    FLOPS_PER_MS,
    MAX_FREEZE_RATIO,
    MODELS,
    PAPER,
    SCHEDULES,
    Prediction,
    frozen_share,
    gain,
    predict,
)
from benchmarks.paper.variants import CostOptions, Variant
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, result_file, write_json

WITHIN = 4.0  # points
FLOPS_PER_BYTE = FLOPS_PER_MS / 4.8e9  # an H200's balance, about 206; an A6000's (155 TFLOP/s, 0.768 TB/s) is 202
PAPER_BATCH_MS, PAPER_BATCH_CUT = 698.0, 31.66  # appendix "Four-GPU Pipeline Schedules": 8B, GPipe

Table = Mapping[tuple[str, str], Prediction]
EVEN_ROW, LOSS_ROW = "layers split evenly (8, 8, 8, 8)", "memory traffic of the loss"
LOSS = CostOptions(loss_forward_bytes=14.0, loss_backward_bytes=22.0, flops_per_byte=FLOPS_PER_BYTE)
ADDING = CostOptions(weight_gradient_bytes=18.0, flops_per_byte=FLOPS_PER_BYTE)
EVERYTHING = replace(LOSS, weight_gradient_bytes=18.0, recompute=0.5)
VARIANTS = {
    "as above": Variant(),
    EVEN_ROW: Variant(ends=0),
    "the paper's lower bound of stage 0: nothing left": Variant(first_stage_disappears=True),
    "no head on the last stage": Variant(CostOptions(head=False)),
    "attention computes all scores, not half": Variant(CostOptions(attention_share=1.0)),
    "every second layer recomputed": Variant(CostOptions(recompute=0.5)),
    "every layer recomputed": Variant(CostOptions(recompute=1.0)),
    LOSS_ROW: Variant(LOSS),
    "memory traffic of adding up weight gradients": Variant(ADDING),
    "both, and every second layer recomputed": Variant(EVERYTHING),
}

NOTES = {
    ("1B", "gpipe"): "a",
    ("1B", "interleaved"): "a, b",
    ("1B", "zbv"): "a, c",
    ("8B", "interleaved"): "b",
    ("13B", "gpipe"): "d",
    ("13B", "zbv"): "c",
}
"""Why a prediction is more than ``WITHIN`` points off; the letters are explained in ``REASONS``."""

ASSUMPTIONS = """\
Compare the gains that the planner predicts for the paper's models with the paper's own. The predictions are computed
from the models' sizes and are not measured. This command makes them again, and writes this page:

```sh
python -m benchmarks.paper.predicted
```

They rest on these assumptions:

- **From the paper** (table "Experimental setup"): 4 ranks, 8 microbatches of 2 sequences (local batch 16), 1024
  tokens a sequence, r_max 0.8, T_w, T_m, T_f and the number of steps. It uses TorchTitan, and therefore torch's
  schedules. The 6 microbatches on 6 ranks are the paper's too. For 8 ranks it gives no number of microbatches, and we
  take 8.
- **From the models' published `config.json`:** layers, widths, grouped-query attention and vocabulary. The head is a
  separate matrix on the last stage. The 1B model ties it to the embedding, but TorchTitan's stages share no weights.
- **TorchTitan's defaults where the paper gives no value:** the split of the layers counts embedding and head as a
  layer each (8B: 8, 9, 8, 7). Interleaved 1F1B and ZBV have two stages a rank. The authors' published code
  (github.com/orangingq/TimelyFreeze at 4890401) has both defaults, but not the arguments of its runs.
- **Time** is FLOPs over one constant rate. Communication, the optimizer, norms, the loss's memory traffic, kernel
  launches and recomputation are left out. The table in [What the prediction rests on](#what-the-prediction-rests-on)
  shows what they would change.
- No constant was fitted.

The tables have three gains:

- *plan* is the planner's makespan with nothing frozen, divided by the planned makespan, minus 1.
- *stable* also counts that stage 0's backward takes no time where the plan freezes it whole.
- *run* is the gain in throughput over the whole run, with warm-up, monitoring and ramp.

The paper's tables probably show *run*, for three reasons. The paper defines its freeze ratio as a mean over steps. The
authors' code (`log_final`) averages the time over all logging windows. And the paper has a freeze ratio of 72.2% for
13B. The mean over the run is {saturated:.1f}% if everything is frozen at 80% throughout stable freezing."""

FREEZE_RATIOS = """\
Gains agree better than freeze ratios. The slowest stage decides the gain. The other stages' slack decides how much
must be frozen for it. The paper's 8B pipeline freezes 0.55 times the predicted share under GPipe, and 0.70 times under
1F1B. So its last stage was probably slower, relative to the others, than FLOPs suggest. The loss's memory traffic
would have that effect: with it the predictions are {loss_gpipe:.0f} and {loss_1f1b:.0f}% (paper: 36 and 33%).

In 8 of the 12 cells the paper freezes more than predicted. The largest differences are 8B under interleaved 1F1B
({interleaved:.0f}% predicted, 60% in the paper) and 1B under ZBV ({zbv_1b:.0f}% and 40%). We do not know why."""

REASONS = {
    "a": """The 1B model's head computes as much as 4.3 of its layers. It feeds a loss over 128,256 logits, which
moves memory and cannot be frozen. Both are on the slowest stage. With the least memory traffic of the loss (row "1B"
in the next table) the predictions are {loss_1b}. The paper's gains lie between the two predictions, or within a
point. The paper's freeze ratios under GPipe and 1F1B are 20.0 and 15.5%. Both are near {one_stage:.1f}%, the ratio of
one stage frozen at 80% and three not at all. So probably only the last stage limited the batch.""",
    "b": """Interleaving adds sends and makes stages smaller. Freezing shortens neither sends nor kernel launches. In
the paper the unfrozen 1B model (A6000s over PCIe) changes its throughput by {interleaved_1b_paper:+.1f}% from 1F1B to
interleaved 1F1B. The prediction, from the order of actions alone, is {interleaved_1b:+.1f}%. For 8B (NVLink) the paper
has {interleaved_8b_paper:+.1f}%, and the prediction is {interleaved_8b:+.1f}%. An even split of 8B's layers lowers the
predicted run gain by another {even_8b:.1f} points.""",
    "c": """A split backward costs more in torch than its two products: it walks the graph twice and keeps
intermediates, frozen or not. In the paper unfrozen ZBV is faster than 1F1B by {zbv_1b_paper:.0f}, {zbv_8b_paper:.0f}
and {zbv_13b_paper:.0f}% (1B, 8B, 13B). The predictions are {zbv_1b:.0f}, {zbv_8b:.0f} and {zbv_13b:.0f}%. These costs
remain when W is frozen.""",
    "d": """In the paper unfrozen GPipe is {gpipe_13b_paper:.0f}% slower than unfrozen 1F1B at 13B. The prediction is
{gpipe_13b:.0f}%, so something outside the schedule probably slowed the baseline. GPipe keeps the activations of all 8
microbatches of the largest model, and freezing keeps fewer. If the baseline were slower by the predicted difference
only, the paper's gain would be {gpipe_13b_corrected:.1f}%. The prediction would then be {gpipe_13b_over:.1f} points
too high.""",
}

SENSITIVITY = """\
The memory rows use published peaks. An H200 has 989 TFLOP/s in bf16 over 4.8 TB/s, which is {balance:g} FLOPs in the
time of a byte; an A6000 has 202. Each tensor counts once. A bf16 head with a float32 loss moves 14 bytes a logit
forward and 22 backward. Adding bf16 gradients to float32 ones moves 18 bytes a weight and microbatch.

The two kinds of traffic change the gain in opposite directions. The rows show directions and upper limits, because
real products do not reach the compute peak. The prediction from FLOPs alone lies between them. So the predictions
agree with the paper partly because the effects that they leave out cancel.

TorchTitan recomputes every second layer by default. The authors did not publish whether they did. Their batch of
stable freezing speaks against it: the prediction is {cut:.1f}% less time without recomputation and
{cut_recompute:.1f}% with it, and the paper has {paper_cut}%."""


def main() -> None:
    command_line(__doc__).parse_args()
    table = {(model, schedule): predict(model, schedule) for model in MODELS for schedule in SCHEDULES}
    wider = [
        predict(model, schedule, ranks, microbatches)
        for ranks, microbatches in ((6, 6), (8, 8))
        for model in MODELS
        for schedule in SCHEDULES
    ]
    variants = {f"8B, {name}": predict_all("8B", variant) for name, variant in VARIANTS.items()}
    variants[f"1B, {LOSS_ROW}"] = predict_all("1B", VARIANTS[LOSS_ROW])
    page = "\n".join(document(table, wider, variants)) + "\n"
    print(page, end="")
    (ROOT / "docs" / "predicted.md").write_text(page)
    record = {
        "settings": {name: asdict(setting) for name, setting in MODELS.items()},
        "max_freeze_ratio": MAX_FREEZE_RATIO,
        "four_ranks": [asdict(row) | {"paper": asdict(PAPER[key])} for key, row in table.items()],
        "six_and_eight_ranks": [asdict(row) for row in wider],
        "variants": {name: [asdict(row) for row in rows.values()] for name, rows in variants.items()},
    }
    write_json(result_file("paper/predicted.json"), record)


def predict_all(model: str, variant: Variant) -> dict[str, Prediction]:
    return {schedule: predict(model, schedule, variant=variant) for schedule in SCHEDULES}


def document(
    table: Table, wider: Sequence[Prediction], variants: Mapping[str, Mapping[str, Prediction]]
) -> Iterator[str]:
    """The page's lines."""
    yield from ("# The paper's tables, predicted", "")
    yield ASSUMPTIONS.format(saturated=100.0 * frozen_share(MODELS["13B"], 1.0))
    yield from ("", "## 4 ranks, next to the paper", "")
    yield "Throughput is over the run, in % of the same model's unfrozen GPipe. Freeze ratios are in %. *off* is the"
    yield f"predicted run gain minus the paper's, in points. Above {WITHIN:g} points, a letter names the reason below."
    yield ""
    yield from markdown(FOUR_RANKS, [four_ranks(row, table[row.model, "gpipe"]) for row in table.values()])
    yield from ("", one_batch(table["8B", "gpipe"]))
    yield from ("", "## Why they differ", "", freeze_ratios(table, variants), "")
    yield f"The likely reasons for differences above {WITHIN:g} points follow. We read them from the paper's"
    yield "own figures and ran nothing on its machines."
    yield ""
    yield from reasons(table, variants)
    yield from ("", "## What the prediction rests on", "")
    yield "The cells are gains in %, plan / run, on 4 ranks. A row's name says which assumptions it changes."
    yield ""
    paper = ["8B, the paper", *(f"{PAPER['8B', s].gain:.1f}" for s in SCHEDULES)]
    rows = [
        [name, *(f"{r.plan_gain:.1f} / {r.run_gain:.1f}" for r in found.values())] for name, found in variants.items()
    ]
    yield from markdown(["", *SCHEDULES.values()], [paper, *rows])
    yield from ("", sensitivity(table["8B", "gpipe"], variants["8B, every second layer recomputed"]["gpipe"]))
    yield from ("", "## 6 and 8 ranks", "")
    yield "The paper has no figures to compare with these. It only shows timelines of some (1B under GPipe and 1F1B)."
    yield ""
    yield from markdown(MORE_RANKS, [more_ranks(row) for row in wider])


FOUR_RANKS = [
    *("model", "schedule", "unfrozen", "paper", "timely", "paper"),
    *("gain: plan", "stable", "run", "paper", "off", "freeze ratio: plan", "run", "paper"),
]
MORE_RANKS = ["ranks", "model", "schedule", "gain: plan", "stable", "run", "freeze ratio: plan", "run"]


def four_ranks(row: Prediction, gpipe: Prediction) -> list[str]:
    paper, base = PAPER[row.model, row.schedule], PAPER[row.model, "gpipe"].unfrozen
    unfrozen = 100.0 * gpipe.unfrozen_ms / row.unfrozen_ms
    off = row.run_gain - paper.gain
    note = f" **{NOTES[row.model, row.schedule]}**" if abs(off) > WITHIN else ""
    figures = [unfrozen, 100.0 * paper.unfrozen / base, unfrozen * (1.0 + row.run_gain / 100.0)]
    figures += [100.0 * paper.timely / base, row.plan_gain, row.stable_gain, row.run_gain, paper.gain]
    return [
        row.model,
        SCHEDULES[row.schedule],
        *(f"{figure:.1f}" for figure in figures),
        f"{off:+.1f}{note}",
        *(f"{ratio:.1f}" for ratio in (row.plan_freeze_ratio, row.run_freeze_ratio, paper.freeze_ratio)),
    ]


def more_ranks(row: Prediction) -> list[str]:
    figures = (row.plan_gain, row.stable_gain, row.run_gain, row.plan_freeze_ratio, row.run_freeze_ratio)
    return [str(row.ranks), row.model, SCHEDULES[row.schedule], *(f"{figure:.1f}" for figure in figures)]


def batch_cut(row: Prediction) -> float:
    """Return the reduction of batch time by stable freezing, in %."""
    return 100.0 * (1.0 - 1.0 / (1.0 + row.stable_gain / 100.0))


def one_batch(row: Prediction) -> str:
    """The paper's one figure of a single batch, with neither warm-up nor optimizer in it."""
    paper_gain = gain(PAPER_BATCH_MS, PAPER_BATCH_MS * (1.0 - PAPER_BATCH_CUT / 100.0))
    text = (
        f"The paper has one figure for a single batch of stable freezing (appendix, 8B, GPipe): {PAPER_BATCH_CUT}%"
        f" less than {PAPER_BATCH_MS:g} ms, which is a gain of {paper_gain:.1f}%. The prediction (*stable*) is"
        f" {batch_cut(row):.1f}% less, a gain of {row.stable_gain:.1f}%. At {PAPER_BATCH_MS:g} ms the stages would"
        f" compute at {100.0 * row.unfrozen_ms / PAPER_BATCH_MS:.0f}% of an H200's dense bf16 peak."
    )
    return textwrap.fill(text, width=120)


def freeze_ratios(table: Table, variants: Mapping[str, Mapping[str, Prediction]]) -> str:
    loss = variants[f"8B, {LOSS_ROW}"]
    text = FREEZE_RATIOS.format(
        loss_gpipe=loss["gpipe"].run_freeze_ratio,
        loss_1f1b=loss["one_f_one_b"].run_freeze_ratio,
        interleaved=table["8B", "interleaved"].run_freeze_ratio,
        zbv_1b=table["1B", "zbv"].run_freeze_ratio,
    )
    return wrapped(text)


def reasons(table: Table, variants: Mapping[str, Mapping[str, Prediction]]) -> Iterator[str]:
    """The lettered notes, one bullet each."""
    loss_1b = ", ".join(f"{row.run_gain:.1f}" for row in variants[f"1B, {LOSS_ROW}"].values())
    figures: dict[str, float] = {}
    for model, schedule in (("1B", "interleaved"), ("8B", "interleaved"), ("1B", "zbv"), ("8B", "zbv"), ("13B", "zbv")):
        key = f"{schedule}_{model.lower()}"
        figures[key] = gain(table[model, "one_f_one_b"].unfrozen_ms, table[model, schedule].unfrozen_ms)
        figures[f"{key}_paper"] = gain(PAPER[model, schedule].unfrozen, PAPER[model, "one_f_one_b"].unfrozen)
    even = variants[f"8B, {EVEN_ROW}"]["interleaved"].run_gain
    figures["even_8b"] = table["8B", "interleaved"].run_gain - even
    figures["one_stage"] = 100.0 * frozen_share(MODELS["1B"], 0.25)
    slower = table["13B", "one_f_one_b"].unfrozen_ms / table["13B", "gpipe"].unfrozen_ms
    baseline = PAPER["13B", "one_f_one_b"].unfrozen * slower
    figures["gpipe_13b"] = 100.0 * (1.0 - slower)
    figures["gpipe_13b_paper"] = 100.0 * (1.0 - PAPER["13B", "gpipe"].unfrozen / PAPER["13B", "one_f_one_b"].unfrozen)
    figures["gpipe_13b_corrected"] = gain(PAPER["13B", "gpipe"].timely, baseline)
    figures["gpipe_13b_over"] = table["13B", "gpipe"].run_gain - figures["gpipe_13b_corrected"]
    for letter, text in REASONS.items():
        yield textwrap.fill(
            f"- **{letter}.** {text.format(loss_1b=loss_1b, **figures)}", width=120, subsequent_indent="  "
        )


def sensitivity(row: Prediction, recomputed: Prediction) -> str:
    text = SENSITIVITY.format(
        balance=round(FLOPS_PER_BYTE),
        cut=batch_cut(row),
        cut_recompute=batch_cut(recomputed),
        paper_cut=PAPER_BATCH_CUT,
    )
    return wrapped(text)


def wrapped(text: str) -> str:
    """Return the paragraphs of ``text``, wrapped to the width of a page."""
    return "\n\n".join(textwrap.fill(paragraph, width=120) for paragraph in text.split("\n\n"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table that reads well in a terminal too."""
    grid = [head, *rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(head))]
    for number, row in enumerate(grid):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


if __name__ == "__main__":
    main()
