"""What the levers bring, side by side, on two pipeline stages of this machine's CPU. `make demo` runs this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import paired

from tf_adapters.report.gantt import draw_panels
from tf_adapters.report.layout import panels_of
from tf_adapters.report.schema import Report
from tf_adapters.testing import RankPool

DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
WAYS: dict[str, dict[str, Any]] = {
    "deferred, exact": {**DEFERRED, "max_freeze_ratio": 0.0},
    "deferred, tokens": {**DEFERRED, "granularity": "token", "max_freeze_ratio": 0.5},
    "tensors frozen": {},
}


def main() -> None:
    # So many stable steps that the exact run is compared with the host alone in 8 control steps.
    options = paired.Options(output_dir=parse_args().output_dir, microbatches=4, stable=44)
    print(
        f"Training a GPT of {options.blocks} blocks on {options.stages} pipeline stages with {options.microbatches} "
        f"microbatches, {len(WAYS) + 1} times in turn, step by step:\n"
        "- DeepSpeed alone;\n"
        "- with weight gradients that wait until a rank would idle, which changes no bit;\n"
        "- with some of those made from a sample of the tokens, too, as far as that shortens the batch;\n"
        "- with tensors frozen and nothing else.\n"
        f"{options.steps} steps, a few minutes.\n",
        flush=True,
    )
    with RankPool(options.stages, paired.setup) as ranks:
        rows = ranks.run(paired.side_by_side, options, WAYS, timeout_s=1800)[0]
    picture = Path(options.output_dir) / "schedule.png"
    shown = rows[2].report
    draw_panels(panels_of(Report.read(shown)), "One batch on deepspeed", picture)
    print(table(rows))
    print(f"\nreport   {shown}   (tf-adapters show {shown})\npicture  {picture}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo", help="for the reports and the picture")
    return parser.parse_args()


def table(rows: Sequence[paired.Row]) -> str:
    """What the run showed, for people."""
    alone = rows[0].held_out_loss
    lines = [
        ("", *(row.name for row in rows)),
        ("step time", *(f"{row.step_ms:.0f} ms" for row in rows)),
        ("speedup, measured", *(f"{row.speedup:.2f}x" for row in rows)),
        ("speedup, planned", *(f"{row.planned:.2f}x" for row in rows)),
        ("weight gradients skipped", *(f"{row.mean_freeze_ratio:.0%}" for row in rows)),
        ("held-out loss, same steps", *(f"{row.held_out_loss:.4f}" for row in rows)),
        ("", *("the same" if row.held_out_loss == alone else "" for row in rows)),
    ]
    return "\n".join(f"{name:<26}{''.join(f'{cell:>18}' for cell in cells)}" for name, *cells in lines).rstrip()


if __name__ == "__main__":
    main()
