"""What freezing gains and costs on DeepSpeed's pipeline engine: `make bench`.

Two stages on this machine's CPU, one thread each. Times are ratios of steps that ran in turn in the same
processes; memory is the peak above an idle process, in processes of its own. Writes JSON beside this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "deepspeed_gpt"))

import paired
from measuring import MODES, Result, for_memory, peak_above_idle, peak_memory, publish

from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import Step

NOT_FREEZING_PAIRS = 60


def main() -> None:
    args = parse_args()
    for config in args.configs:
        options = paired.Options(
            config=config,
            warmup=args.warmup,
            monitoring=args.monitoring,
            progressive=10,
            stable=args.stable,
            max_freeze_ratio=args.max_freeze_ratio,
            output_dir=f"runs/bench/{config}",
        )
        publish(f"deepspeed_speed_{config}", "deepspeed", options, measure(options))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["plain", "gpipe"], help="names in deepspeed_configs/")
    parser.add_argument("--max-freeze-ratio", type=float, default=0.8)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--monitoring", type=int, default=60)
    parser.add_argument("--stable", type=int, default=40, help="pairs of steps in stable freezing")
    return parser.parse_args()


def measure(options: paired.Options) -> Result:
    with RankPool(options.stages, paired.setup) as ranks:
        outcome = ranks.run(paired.run, options, timeout_s=3600)[0]
        not_freezing = None
        if "schedule" not in options.ds_config()["timely_freeze"]:
            attached = replace(options, warmup=NOT_FREEZING_PAIRS)
            not_freezing = ranks.run(paired.run_without_freezing, attached, timeout_s=3600)[0].ratio("warmup")
    peaks = {mode: peak_memory(options.stages, paired.setup, peak_of_rank, options, mode) for mode in MODES}
    return Result.of(options.config, outcome, not_freezing, peaks)


def peak_of_rank(options: paired.Options, mode: str) -> int:
    import tf_adapters.deepspeed.adapter  # noqa: F401

    short = for_memory(options, mode)

    def build() -> Step:
        return paired.training_step(paired.build_engine(short, freezing=mode != "alone")[0], short)

    return peak_above_idle(build, settle=short.monitoring + 6)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
