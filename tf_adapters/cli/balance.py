"""``tf-adapters balance REPORT.json``: the best distribution of the layers over the stages, and its gain."""

from __future__ import annotations

import argparse
import json
import re
from itertools import accumulate

from tf_adapters.advice.balance import Balance, Cut, balance
from tf_adapters.errors import ConfigError, TimelyFreezeError
from tf_adapters.report.page import Page, Table, print_page
from tf_adapters.report.schema import Report

_HEADER = ("stage", "rank", "layers", "parameters", "ms a microbatch", "layers then", "parameters then", "ms then")
_REMARKS = (
    "memory is not in it: a stage with more layers also keeps more activations, the first ones most",
    "only the present step's times are known: predicted is what the same layers would take on other stages",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "spread a model's layers over the stages so that the batch ends earliest, from a run's report.json"
    parser = subparsers.add_parser("balance", help=about, description=f"tf-adapters balance: {about}.")
    parser.add_argument("report", metavar="REPORT.json", help="<output_dir>/timely_freeze/report.json of a run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = Report.read(args.report)
    try:
        print_page(page(report, balance(report)))
    except TimelyFreezeError as error:
        raise ConfigError(f"{args.report}: {error}") from None
    return 0


def page(report: Report, result: Balance) -> Page:
    facts = [
        ("pipeline", f"{report.host}: {_counts(result.now)} layers on the stages"),
        ("batch", f"{result.now.makespan_ms:,.1f} ms; {_idle(result, result.now):.0%} of the ranks' time idle"),
    ]
    if result.moves:
        best = result.best
        facts += [
            ("then", f"{_counts(best)} layers on the stages"),
            ("batch then", f"{best.makespan_ms:,.1f} ms predicted; {_idle(result, best):.0%} idle"),
            ("say it", say_it(report.host.name, best)),
        ]
    return Page(_headline(result), tuple(facts), tables=(_table(result),), notes=_REMARKS if result.moves else ())


def _headline(result: Balance) -> str:
    if not result.moves:
        return "the layers are spread as well as they can be: moving any brings less than half a percent"
    if result.step_ms is None or result.best_step_ms is None:
        return f"batch {result.gain:.2f}x as fast predicted, with layers on other stages"
    return (
        f"step {result.step_ms:,.1f} ms -> {result.best_step_ms:,.1f} ms predicted: {result.gain:.2f}x, "
        "with layers on other stages"
    )


def _counts(cut: Cut) -> str:
    return " | ".join(str(len(layers)) for layers in cut.layers)


def _idle(result: Balance, cut: Cut) -> float:
    """The share of the ranks' time in the batch in which they compute nothing, in [0, 1]."""
    ranks, microbatches = len(result.schedule.ranks), result.schedule.num_microbatches
    busy = microbatches * sum(forward + backward for forward, backward in cut.stage_ms)
    return max(0.0, 1.0 - busy / (ranks * cut.makespan_ms)) if cut.makespan_ms else 0.0


def _table(result: Balance) -> Table:
    rows = []
    for stage in range(len(result.now.layers)):
        then = _cells(result.best, stage) if result.moves else ("-",) * 3
        rows.append((str(stage), str(result.schedule.rank_of(stage)), *_cells(result.now, stage), *then))
    return Table("Layers of each stage (ms: forward + backward of one microbatch)", _HEADER, tuple(rows))


def _cells(cut: Cut, stage: int) -> tuple[str, str, str]:
    forward, backward = cut.stage_ms[stage]
    return str(len(cut.layers[stage])), f"{cut.parameters[stage]:,}", f"{forward:.1f} + {backward:.1f}"


def say_it(host: str, cut: Cut) -> str:
    """Return the setting of the host that gives this cut."""
    if host == "megatron-core" and (layout := _megatron_layout(cut)):
        return f"--pipeline-model-parallel-layout '{layout}'"
    if host == "deepspeed":
        starts = [0, *accumulate(len(layers) for layers in cut.layers[:-1])]
        numbered = all(name.isdecimal() for layers in cut.layers for name in layers)
        numbers = [int(layers[0]) for layers in cut.layers] if numbered else starts
        return f"the stages begin at layers {[0, *numbers[1:]]} of the PipelineModule"
    what = "TorchTitan's module_fqns_per_model_part" if host == "torch.distributed.pipelining" else "the stages' layers"
    return f"{what}: {json.dumps(cut.layers)}"


def _megatron_layout(cut: Cut) -> str | None:
    """Return Megatron's layout: E for the embedding, t for a decoder layer, L for norm, output layer and loss."""
    stages = []
    for layers in cut.layers:
        tokens = ["t" if re.search(r"\.layers\.\d+$", name) else "E" if "embedding" in name else "L" for name in layers]
        text = "".join(tokens)
        if not re.fullmatch(r"E?t*L*", text):
            return None
        decoders = text.count("t")
        stages.append("E" * ("E" in text) + (f"t*{decoders}" if decoders > 1 else "t" * decoders) + "L" * ("L" in text))
    return "|".join(stages)
