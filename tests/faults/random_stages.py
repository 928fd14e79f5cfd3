"""Random small stages on torch's schedules: in place, deferred and with sampled tokens, against host and oracle.

    python tests/faults/random_stages.py --seeds 500 [--first N] [--known]
    python tests/faults/random_stages.py --each          # every kind of part alone, in all modes
    python tests/faults/random_stages.py --first 17 --seeds 1 --shrink

A case is a pure function of its seed. Cases that the host alone cannot train are skipped; cases that the package
refuses with its own error count as refused, and differences in a step that a note of the run names as said; every other
difference is a failure. Parts and modes that are known to fail
(``KNOWN``, ``KNOWN_MODES``) stay out, unless ``--known``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from stage_cases import KNOWN, Case, cases_of_one, draw_case, smaller
from stage_runs import KNOWN_MODES, MODES, Outcome, run_case

from tf_adapters.testing import RankPool, RanksFailed
from tf_adapters.testing.ranks import HANG_S

RANKS = 2
PRELOAD = ("torch.distributed.pipelining", "torch._dynamo", "tf_adapters.torch_pipelining")
MODES_OF_ONE = 5
SHRINK_S = 60.0


@dataclass
class Result:
    """The result of a case: by mode what was wrong and what was refused, or why it was skipped."""

    case: Case
    skipped: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """The case, and by what was wrong the modes where it was."""
        modes: dict[str, list[str]] = {}
        for mode, texts in self.wrong.items():
            modes.setdefault(f"{texts[0]:.200} ({len(texts)} in all)", []).append(mode)
        lines = [f"    {'; '.join(names)}: {text}" for text, names in modes.items()]
        return "\n".join([f"seed {self.case.number}: {self.case}", *lines])


def judge(pool: RankPool, case: Case, modes: Iterable[str] = tuple(MODES), plant: str = "") -> Result:
    """Run a case in all modes. Where its ranks hang or die, which ends them, go on with fresh ones, mode by mode."""
    result, modes = Result(case), tuple(modes)
    with tempfile.TemporaryDirectory(prefix="stages") as folder:
        try:
            outcomes: list[Outcome] = pool.run(run_case, case, modes, folder, plant, timeout_s=HANG_S)
        except RanksFailed as failed:
            if len(modes) == 1:
                result.wrong[modes[0]] = [f"ranks failed: {failed}"]
            for mode in modes if len(modes) > 1 else ():
                alone = judge(pool, case, (mode,), plant)
                result.wrong |= alone.wrong
            return result
    result.skipped = outcomes[0].skipped
    for mode in modes:
        texts = [text for outcome in outcomes for text in outcome.wrong.get(mode, ())]
        if texts:
            result.wrong[mode] = list(dict.fromkeys(texts))
    for outcome in outcomes:
        result.refused |= outcome.refused
        result.said |= outcome.said
    return result


def shrink(pool: RankPool, result: Result) -> Result:
    """The least of the case that still goes wrong in one of the same modes."""
    until, modes = time.monotonic() + SHRINK_S, tuple(result.wrong)[:1]
    least = result
    found = True
    while found and time.monotonic() < until:
        found = False
        for case in smaller(least.case):
            tried = judge(pool, case, modes)
            if tried.wrong:
                least, found = tried, True
                break
            if time.monotonic() > until:
                break
    return least


def some_modes(case: Case) -> tuple[str, ...]:
    """Half of the modes, drawn by the case's number."""
    modes = [mode for mode in MODES if mode not in KNOWN_MODES]
    return tuple(sorted(random.Random(case.number).sample(modes, MODES_OF_ONE)))


def judge_all(
    cases: Iterable[Case],
    pools: int = 2,
    shrunk: bool = False,
    modes_of: Callable[[Case], Iterable[str]] = some_modes,
) -> Iterator[Result]:
    """Results in the order of the cases, from ``pools`` pools of ranks side by side."""
    free: SimpleQueue[RankPool] = SimpleQueue()
    made = [RankPool(RANKS, preload=PRELOAD) for _ in range(pools)]
    for pool in made:
        pool.run(os.getpid)
        free.put(pool)

    def one(case: Case) -> Result:
        pool = free.get()
        try:
            result = judge(pool, case, modes_of(case))
            return shrink(pool, result) if shrunk and result.wrong else result
        finally:
            free.put(pool)

    with ThreadPoolExecutor(pools) as threads:
        try:
            yield from threads.map(one, cases)
        finally:
            for pool in made:
                pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--known", action="store_true", help="also parts and modes that are known to fail")
    parser.add_argument("--each", action="store_true", help="every kind of part alone instead")
    parser.add_argument("--shrink", action="store_true", help="drop parts of a failing case while it fails")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="these, instead of all")
    args = parser.parse_args()
    without: Collection[str] = () if args.known else KNOWN
    cases = [draw_case(number, without) for number in range(args.first, args.first + args.seeds)]
    if args.each:
        cases = cases_of_one()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()  # of what was skipped or refused
    began = time.monotonic()
    for result in judge_all(cases, shrunk=args.shrink, modes_of=lambda _: args.modes or tuple(MODES)):
        kind = "failed" if result.wrong else "skipped" if result.skipped else "refused" if result.refused else "right"
        kind = "said" if kind == "right" and result.said else kind
        counts[kind] += 1
        reasons.update({result.skipped: 1} if result.skipped else set(result.refused.values()))
        if result.wrong:
            print(result, flush=True)
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"{count} times: {reason:.300}")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
