"""With and without freezing, side by side, on two pipeline stages of this machine's CPU. `make demo` runs this."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import paired

from tf_adapters.report.gantt import draw
from tf_adapters.report.schema import Report
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Outcome


def main() -> None:
    options = paired.Options(output_dir=parse_args().output_dir)
    print(
        f"Training a GPT of {options.blocks} blocks on {options.stages} pipeline stages, twice in turn, step by step:\n"
        f"DeepSpeed alone, and with TimelyFreeze. {options.steps} steps, a few minutes.\n",
        flush=True,
    )
    with RankPool(options.stages, paired.setup) as ranks:
        outcome = ranks.run(paired.run, options, timeout_s=1800)[0]
    picture = Path(options.output_dir) / "timely_freeze" / "schedule.png"
    draw(Report.read(outcome.report), picture)
    print(table(outcome))
    print(f"\nreport   {outcome.report}   (tf-adapters show {outcome.report})\npicture  {picture}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo", help="for the report and the picture")
    return parser.parse_args()


def table(outcome: Outcome) -> str:
    """What the run showed, for people."""
    pairs = outcome.pairs
    alone, frozen = (statistics.median(times["stable"]) for times in (pairs.alone, pairs.attached))
    rows = [
        ("", "DeepSpeed alone", "with freezing"),
        ("step time, stable freezing", f"{alone:.0f} ms", f"{frozen:.0f} ms"),
        ("speedup, measured", "1.00x", f"{1 / pairs.ratio('stable'):.2f}x"),
        ("speedup, planned", "", f"{1 / outcome.planned_ratio:.2f}x"),
        ("held-out loss, same steps", f"{outcome.held_out_alone:.3f}", f"{outcome.held_out_attached:.3f}"),
    ]
    return "\n".join(f"{name:<28}{left:>18}{right:>18}" for name, left, right in rows)


if __name__ == "__main__":
    main()
