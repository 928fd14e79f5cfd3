"""What each goal brings on two pipeline stages of this machine's CPU. `make demo` runs this."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import paired

from tf_adapters.report.gantt import draw_panels
from tf_adapters.report.layout import panels_of
from tf_adapters.report.schema import Report
from tf_adapters.testing import RankPool

ALONE = "DeepSpeed alone"
ROOMY = "exact, 2 extra"
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"goal": "exact"},
    ROOMY: {"goal": "exact", "extra_microbatches": 2},
    "paper": {"goal": "paper"},
}
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_MMAP_MAX_": "0"}
"""By default glibc gives large blocks back. GPUs' allocators keep them, and on a CPU new pages cost more than a tap."""

OPTIONS = paired.Options(
    max_freeze_ratio=None,
    width=1024,
    blocks=2,
    context=32,
    microbatches=4,
    warmup=3,
    monitoring=12,
    progressive=0,
    stable=46,  # with 8 control steps
    settings={"replan_threshold": 0.0},
)

WELCOME = """\
Training a GPT, 1,024 wide, on 2 pipeline stages with 4 microbatches, four times:
- DeepSpeed alone;
- exact: weight gradients wait until a rank would idle, which changes no bit;
- exact, 2 extra: the same, and ranks hold up to 2 more microbatches;
- paper: TimelyFreeze, which skips whole weight gradients.
Some steps of each training run as DeepSpeed alone. The speedup is over these control steps.
{steps} steps each, about three minutes in all on two free cores.
"""


def main() -> None:
    folder = parse_args().output_dir
    os.environ.update(KEEP_FREED_MEMORY)
    print(WELCOME.format(steps=OPTIONS.steps), flush=True)
    trained: dict[str, paired.Trained] = {}
    with RankPool(OPTIONS.stages, paired.setup) as ranks:
        trained[ALONE] = ranks.run(paired.train, OPTIONS, False, timeout_s=1800)[0]
        for number, (name, settings) in enumerate(WAYS.items(), 1):
            print(f"\n{name}:", flush=True)
            chosen = {**OPTIONS.settings, **settings}
            options = replace(OPTIONS, settings=chosen, output_dir=f"{folder}/{number}")
            trained[name] = ranks.run(paired.train, options, True, timeout_s=1800)[0]
    picture, shown = Path(folder) / "schedule.png", trained[ROOMY].report
    draw_panels(panels_of(Report.read(shown)), "One batch on deepspeed", picture)
    print(f"\n{table(trained)}")
    print(f"\nreport   {shown}   (tf-adapters show {shown})\npicture  {picture}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo", help="for the reports and the picture")
    return parser.parse_args()


def table(trained: Mapping[str, paired.Trained]) -> str:
    """What the run showed, for people. Every figure of speed is from the training's own report."""
    alone = trained[ALONE]
    columns = [
        (
            ALONE,
            f"{alone.step_ms:.0f} ms",
            "",
            "1.00x",
            "",
            "0%",
            f"{alone.held_out_loss:.4f}",
            "",
        )
    ]
    for name in WAYS:
        columns.append((name, *_figures(trained[name], alone)))
    titles = (
        "",
        "step",
        "step as DeepSpeed alone",
        "speedup",
        "its 95% interval",
        "weight gradients skipped",
        "held-out loss, same steps",
        "",
    )
    lines = zip(titles, *columns, strict=True)
    return "\n".join(f"{title:<26}{''.join(f'{cell:>18}' for cell in cells)}".rstrip() for title, *cells in lines)


def _figures(way: paired.Trained, alone: paired.Trained) -> tuple[str, ...]:
    """The cells of a training below its name."""
    report = Report.read(way.report)
    measured, plan = report.measured, report.plan
    low, high = measured.speedup_interval or (0.0, 0.0)
    return (
        f"{measured.step_ms_stable:.0f} ms",
        f"{measured.host_step_ms:.0f} ms" if measured.host_step_ms else "not known",
        f"{measured.speedup:.2f}x" if measured.speedup else "not known",
        f"{low:.2f}x to {high:.2f}x" if measured.speedup else "",
        f"{plan.mean_freeze_ratio:.0%}" if plan else "",
        f"{way.held_out_loss:.4f}",
        "the same" if way.held_out_loss == alone.held_out_loss else "",
    )


if __name__ == "__main__":
    main()
