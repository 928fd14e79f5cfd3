"""Speed and memory of each goal beside what else shortens a step: other schedules, which need other stages, and others.

Four emulated devices run the real engines of torch and of Megatron-Core: 8 microbatches, 16 equal layers, nothing that
makes ranks meet. Every operation sleeps as long as a slow device would compute, so no figure says anything about a GPU.

Writes results/hosts/alternatives.json and the table into docs/when.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.hosts.goals import PHASES, SIZE
from benchmarks.hosts.overlapping import RATES, SETTLE, step_ms, train
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import Size, setup, start
from tf_adapters.schedule.deferral import whole_microbatches_held
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/alternatives.json")
PAGE = ROOT / "docs" / "when.md"
LAYERS = 16
"""Enough for four stages on each of four ranks."""
FASTER = LAYERS / SIZE.layers
"""Of the devices, so that a forward of a stage takes as long as in the other benchmarks."""
STAGES, SETTING, BATCH = "the stages, the schedule", "a setting", "the batch"


@dataclass(frozen=True)
class Way:
    """One row: a host, what of its pipeline is changed, and our settings, if any."""

    host: str = "torch"
    settings: dict[str, Any] | None = None
    pipeline: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> Size:
        return replace(SIZE, layers=LAYERS, **self.pipeline)

    @property
    def edits(self) -> str:
        changed = {"looped": STAGES, "schedule": STAGES, "microbatches": BATCH}
        edits = [changed[name] for name in self.pipeline] + [SETTING] * bool(self.settings)
        return ", ".join(dict.fromkeys(edits)) or "-"


EXACT = {"goal": "exact"}
INTERLEAVED, MEGATRON = {"schedule": "interleaved"}, {"host": "megatron-core"}
ALONE = {"torch": "1F1B, the host alone", "megatron-core": "Megatron-Core's 1F1B, the host alone"}
WAYS = {
    ALONE["torch"]: Way(),
    "1F1B, 6 microbatches instead of 8": Way(pipeline={"microbatches": 6}),
    "interleaved 1F1B, 2 stages on a rank": Way(pipeline=INTERLEAVED),
    "interleaved 1F1B, 4 stages on a rank": Way(pipeline=INTERLEAVED | {"looped": 4}),
    "interleaved zero bubble, 2 stages on a rank": Way(pipeline={"schedule": "interleaved_zero_bubble"}),
    "ZBV, 2 stages on a rank": Way(pipeline={"schedule": "zbv"}),
    "DualPipeV, 2 stages on a rank": Way(pipeline={"schedule": "dualpipev"}),
    '1F1B, `"goal": "exact"`': Way(settings=EXACT),
    '1F1B, `"goal": "exact"`, `"extra_microbatches": 2`': Way(settings=EXACT | {"extra_microbatches": 2}),
    '1F1B, `"goal": "exact"`, `"extra_microbatches": 4`': Way(settings=EXACT | {"extra_microbatches": 4}),
    '1F1B, `"goal": "paper"`': Way(settings={"goal": "paper"}),
    'interleaved 1F1B, 2 stages on a rank, `"goal": "exact"`': Way(settings=EXACT, pipeline=INTERLEAVED),
    ALONE["megatron-core"]: Way(**MEGATRON),
    "Megatron-Core's interleaved 1F1B, 2 stages on a rank": Way(**MEGATRON, pipeline={"looped": 2}),
    "Megatron-Core's interleaved 1F1B, 4 stages on a rank": Way(**MEGATRON, pipeline={"looped": 4}),
    'Megatron-Core\'s 1F1B, `"goal": "exact"`': Way(**MEGATRON, settings=EXACT),
    'Megatron-Core\'s interleaved 1F1B, 2 stages on a rank, `"goal": "exact"`': Way(
        **MEGATRON, settings=EXACT, pipeline={"looped": 2}
    ),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=ALONE, default=list(ALONE))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for host in [] if args.table else args.hosts:
        of_host = {name: way for name, way in WAYS.items() if way.host == host}
        for chunks in dict.fromkeys(way.size.looped for way in of_host.values()):  # Megatron sets them once
            with RankPool(SIZE.ranks, functools.partial(setup, host)) as pool:
                for name, way in of_host.items():
                    if way.size.looped == chunks:
                        keep(name, of_all(pool.run(run, way, timeout_s=1200)))
    text = table(read_rows())
    put_table(PAGE, "alternatives", text)
    print(text)


def keep(name: str, row: dict[str, Any]) -> None:
    """Replace the figures of one row, and where they come from."""
    print(name, {key: value for key, value in row.items() if key != "losses"}, flush=True)
    row = {name: {**row, "machine": machine(WAYS[name].host)}}
    keep_row(RESULTS, "rows", row, list(WAYS), device="emulated", rates=RATES, faster=FASTER)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by name."""
    return read_part(RESULTS, "rows")


def of_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank says for all, with the losses of a rank that has them."""
    return {**ranks[0], "losses": next(rank["losses"] for rank in ranks if None not in rank["losses"])}


def run(way: Way) -> dict[str, Any]:
    """The step in stable freezing, or of the host alone, and the losses. Called on all ranks at once."""
    alone = way.settings is None
    given = {"monitoring_precision": 0.02, "replan_threshold": 0.0, **(way.settings or {})}
    freezing = PairedSettings(**PHASES, max_freeze_ratio=None, output_dir="runs/bench/alternatives", settings=given)
    with EmulatedDevice(RATES[way.host] * FASTER, real_time=True) as device:
        training = start(way.host, freezing, alone=alone, size=way.size)
        begins, losses = train(training, freezing.steps)
        controller = (training.attach() if alone else training.adapter).controller
        state, order, settled, skipped = controller.state, controller.schedule, SETTLE, 0.0
        if not alone:
            order, skipped = state.plan.schedule or order, state.plan.mean_freeze_ratio
            settled += state.phases.progressive_end
        training.detach()
    return {
        "step_ms": step_ms(begins[settled:]),
        "held": whole_microbatches_held(order),
        "skipped": skipped,
        "losses": losses,
        "emulation_error": device.error,
    }


def table(rows: dict[str, Any]) -> str:
    """One line for each way. Speeds are over the same host alone."""
    lines = []
    for name, row in rows.items():
        alone = rows[ALONE[WAYS[name].host]]
        held = f"{row['held']:.1f}".removesuffix(".0")
        lines.append([name, f"{alone['step_ms'] / row['step_ms']:.3f}x", held, _same(name, rows), WAYS[name].edits])
    return markdown_table(["", "speed", "microbatches held", "same losses", "what you change"], lines)


def _same(name: str, rows: dict[str, Any]) -> str:
    """Whether the losses are those of the host alone: on the same stages for our settings, and else of its 1F1B."""
    way = WAYS[name]
    host = replace(way, settings=None) if way.settings else Way(way.host)
    theirs = rows[next(other for other, of in WAYS.items() if of == host)]["losses"]
    if rows[name]["losses"] == theirs:
        return "yes"
    return "other first weights" if "looped" in way.pipeline and rows[name]["losses"][0] != theirs[0] else "no"


if __name__ == "__main__":
    main()
