"""``tf-adapters plan`` as it is typed: the whole command, reading, checking, solving, proving and writing.

The programs are those of planner.py, through the command's own INPUT and PLAN files. Prints a table and writes
results/core/plan_command.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.core.planner import MAX_FREEZE_RATIO, SCHEDULES, noisy_times, pipeline
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import result_file, write_json
from benchmarks.shared.measuring import machine

SIZES = (4096, 16384, 65536)
COMMAND = [sys.executable, "-c", "import sys; from tf_adapters.cli import main; sys.exit(main())", "plan"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="actions, about")
    args = parser.parse_args()
    runs = []
    print(f"{'schedule':<12}{'actions':>8}{'seconds':>10}{'gap':>10}  solver", flush=True)
    for schedule in args.schedules:
        for size in args.sizes:
            run = timed(schedule, size)
            print("{schedule:<12}{actions:>8}{seconds:>10.1f}{gap:>10.1e}  {solver}".format(**run), flush=True)
            runs.append(run)
    write_json(result_file("core/plan_command.json"), {"machine": machine("ortools"), "runs": runs})


def timed(schedule: str, size: int) -> dict[str, Any]:
    """One run of the command: seconds of it all, and what its plan says of itself."""
    order = pipeline(schedule, size)
    times = {str(action): bounds for action, bounds in noisy_times(order).items()}
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "input.json", Path(folder) / "plan.json"
        given.write_text(
            json.dumps({"ranks": order.to_text(), "times": times, "max_freeze_ratio": MAX_FREEZE_RATIO}),
        )
        began = time.perf_counter()
        subprocess.run([*COMMAND, given, "--out", made], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        solver = json.loads(made.read_text())["solver"]
    return {
        "schedule": schedule,
        "actions": len(order.actions),
        "seconds": seconds,
        "gap": solver["optimality_gap"],
        "solver": solver["name"],
    }


if __name__ == "__main__":
    main()
