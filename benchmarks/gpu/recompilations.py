"""Number of graphs that torch.compile makes of Megatron's fused functions under masks: it must stop growing."""

from __future__ import annotations

import os
from functools import partial

import torch

from benchmarks.gpu.megatron import MICROBATCHES, Case, build, prepare, run_batch, update
from benchmarks.gpu.oracle import PART as ORACLE
from benchmarks.gpu.parts import Check, Options, Part, section
from tf_adapters.testing import force_plan

FUSED = Case(engine=False, model={"bias_activation_fusion": True, "bias_dropout_fusion": True})
STEPS = 40


def run(options: Options) -> list[Check]:
    """Count the graphs that are compiled for the host alone, then with another mask in each step."""
    if not options.cuda:  # Inductor would build C++ for minutes; what counts is dynamo
        os.environ["TORCHDYNAMO_DISABLE"] = "0"
        torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    torch.compile(run)  # torch lists its own functions once, and must do so before a stand-in replaces some
    prepare(options, engine=False)  # its stand-in for Triton is not enough for torch.compile
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    alone = graphs_of(options, freezing=False)
    attached = graphs_of(options, freezing=True)
    return [
        Check("graphs, host alone", alone[-1]),
        Check("graphs, under masks", attached[-1]),
        Check("compiled in the second half, under masks", attached[-1] - attached[STEPS // 2 - 1], most=0),
        Check("graphs for each of the host's", attached[-1] / max(1, alone[-1]), most=3),
    ]


def graphs_of(options: Options, freezing: bool) -> list[int]:
    """Return the number of graphs after each step."""
    import tf_adapters.megatron

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer = build(options, FUSED)
    adapter = None
    if freezing:
        adapter = tf_adapters.megatron.attach([model], optimizer, section(options), num_microbatches=MICROBATCHES)
        force_plan(adapter.controller, 0.5)
    found = []
    for step in range(STEPS):
        run_batch(options, model, step, range(MICROBATCHES))
        update(optimizer)
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    if adapter is not None:
        adapter.detach()
    return found


PART = Part("compiled functions under masks: recompilations", run, ORACLE.missing)
