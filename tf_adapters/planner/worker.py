"""The planner beside training, in a process of its own: when it crashes, hangs or runs out of memory, training goes on.

The process runs at a low priority, ends itself at its time limit, and is the first that a kernel short of memory
kills. Input and output are files: a pipe would make the training wait for a reader that is still starting.

    python -m tf_adapters.planner.worker INPUT.json PLAN.json SECONDS
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from tf_adapters.errors import PlanInputError, SolverError
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.problem import PlanProblem
from tf_adapters.planner.solve import LONGEST_S, plan_from_json

_GRACE_S = 5.0
"""For the process to start and to write its plan, beyond the solver's limit."""


class BackgroundPlan:
    """A plan that another process computes.

    Args:
        problem: what to plan; the process validates it.
        time_limit_s: seconds that the solver may take.

    Raises OSError when no process can be started.
    """

    def __init__(self, problem: PlanProblem, time_limit_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="timely_freeze_")
        folder = Path(self._folder.name)
        self._plan, self._stderr = folder / "plan.json", folder / "stderr.txt"
        (folder / "input.json").write_text(json.dumps(problem.to_json()), encoding="utf-8")
        time_limit_s = min(time_limit_s, LONGEST_S)
        self._limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s + _GRACE_S
        # The process finds the modules that this one does, and uses one core only.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, str(folder / "input.json"), str(self._plan), str(time_limit_s)]
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._folder)

    def poll(self) -> FreezePlan | None:
        """The plan, or None while the process computes it.

        Raises SolverError, one line, when the process has failed, has died or is past its limit.
        """
        status = self._process.poll()
        if status is None:
            if time.monotonic() <= self._deadline:
                return None
            self.close()
            raise SolverError(f"the planner was stopped: no plan within solver_time_limit_s, {self._limit_s:g} s")
        try:
            if status != 0:
                raise SolverError(self._failure(status))
            return FreezePlan.from_json(json.loads(self._plan.read_text(encoding="utf-8")))
        except (OSError, ValueError, PlanInputError) as error:
            raise SolverError(f"the planner's output cannot be read: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        self._finalizer()

    def _failure(self, status: int) -> str:
        lines = self._stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if status < 0:
            return f"the planner was killed by {signal.Signals(-status).name}"
        return lines[-1] if lines else f"the planner ended with exit status {status}"


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    folder.cleanup()


def main(arguments: list[str]) -> int:
    """Read INPUT.json, write PLAN.json; 0, or 1 with one line on stderr."""
    source, target, seconds = Path(arguments[0]), Path(arguments[1]), float(arguments[2])
    _yield_to_training(seconds)
    try:
        plan = plan_from_json(json.loads(source.read_text(encoding="utf-8")), time_limit_s=seconds)
        target.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    except Exception as error:
        print(" ".join(f"{error}".split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


def _yield_to_training(seconds: float) -> None:
    """Lower this process's priority, make it the first to be killed for memory, and limit its time."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(seconds + 2 * _GRACE_S) + 1)  # in case the training process is gone
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # a nice value says nothing under real-time ones
        os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
