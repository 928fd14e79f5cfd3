"""The action timer, driven by a clock that the test moves and whose device lags behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import FakeClock
from one_rank import controller_of, train

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.estimates import median
from tf_adapters.measuring.phase import Phase
from tf_adapters.measuring.timer import ActionTimer, Clock, NvtxTimer, Sample, clock_for, is_capturing
from tf_adapters.schedule.ir import Action, PipelineSchedule

FORWARD, BACKWARD = Action.parse("0F0"), Action.parse("0B0")
UPPER, LOWER = Phase.MONITORING_UPPER, Phase.MONITORING_LOWER


def run(timer: ActionTimer, clock: FakeClock, ms: float, action: Action = BACKWARD, share: float = 0.0) -> None:
    with timer.timed(UPPER, action, share):
        clock.now += ms


def times(timer: ActionTimer, action: Action = BACKWARD) -> list[float]:
    return [sample.ms for sample in timer.samples(UPPER, action)]


def test_a_sample_has_the_time_and_the_frozen_share_of_its_action() -> None:
    clock = FakeClock()
    timer = ActionTimer(clock)
    run(timer, clock, 3.0, share=0.25)
    run(timer, clock, 5.0, Action.parse("0F0"))
    timer.drain()
    assert timer.samples(UPPER, BACKWARD) == (Sample(0.25, 3.0),)
    assert timer.actions(UPPER) == (BACKWARD, Action.parse("0F0"))
    assert timer.samples(LOWER, BACKWARD) == ()
    assert timer.actions(LOWER) == ()


def test_draining_takes_what_the_device_has_passed_and_leaves_the_rest() -> None:
    clock = FakeClock(reached=4.0)
    timer = ActionTimer(clock)
    for ms in (1.0, 2.0, 3.0):
        run(timer, clock, ms)
    assert times(timer) == []
    timer.drain()
    assert times(timer) == [1.0, 2.0]
    timer.drain()
    assert times(timer) == [1.0, 2.0]
    clock.reached = 6.0
    timer.drain()
    assert times(timer) == [1.0, 2.0, 3.0]
    assert clock.waits == 0


def test_draining_with_wait_takes_everything() -> None:
    clock = FakeClock(reached=0.0)
    timer = ActionTimer(clock)
    run(timer, clock, 1.0)
    timer.drain(wait=True)
    assert times(timer) == [1.0]
    assert clock.waits == 1


def test_timing_never_waits_for_the_device() -> None:
    clock = FakeClock(reached=0.0)
    timer = ActionTimer(clock)
    start = timer.start_step()
    run(timer, clock, 1.0)
    timer.stop_step(UPPER, start, 1)
    timer.drain()
    assert clock.waits == 0
    assert timer.step_ms(UPPER) is None


def test_a_block_that_raises_leaves_no_sample() -> None:
    clock = FakeClock()
    timer = ActionTimer(clock)

    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), timer.timed(UPPER, BACKWARD, 0.0):
        fail()
    timer.drain()
    assert times(timer) == []


def test_only_the_newest_samples_are_kept() -> None:
    clock = FakeClock()
    timer = ActionTimer(clock, keep=3)
    for ms in range(1, 8):
        start = timer.start_step()
        run(timer, clock, float(ms))
        timer.stop_step(UPPER, start, ms)
        timer.drain()
    assert times(timer) == [5.0, 6.0, 7.0]
    assert timer.step_ms(UPPER) == 6.0
    assert timer.newest_step_ms == 7.0


def test_steps_are_kept_apart_by_phase() -> None:
    clock = FakeClock()
    timer = ActionTimer(clock)
    for phase, ms in ((UPPER, 10.0), (UPPER, 30.0), (UPPER, 11.0), (LOWER, 4.0)):
        start = timer.start_step()
        clock.now += ms
        timer.stop_step(phase, start, 1)
    timer.drain()
    assert timer.step_ms(UPPER) == 11.0
    assert timer.step_ms(LOWER) == 4.0
    assert timer.step_ms(Phase.STABLE) is None


def test_clear_forgets_samples_steps_and_marks_on_their_way() -> None:
    clock = FakeClock(reached=1.0)
    timer = ActionTimer(clock)
    start = timer.start_step()
    run(timer, clock, 1.0)
    timer.drain()
    run(timer, clock, 2.0)
    timer.stop_step(UPPER, start, 1)
    timer.clear()
    timer.drain(wait=True)
    assert timer.actions(UPPER) == ()
    assert timer.step_ms(UPPER) is None


def test_the_host_clock_counts_milliseconds_forwards() -> None:
    clock = Clock()
    assert clock.elapsed_ms(1_000_000, 3_500_000) == 2.5
    first, second = clock.mark(), clock.mark()
    assert clock.elapsed_ms(first, second) >= 0.0
    clock.synchronize()


def test_a_model_on_the_cpu_is_timed_by_the_host() -> None:
    assert isinstance(clock_for(torch.device("cpu")), Clock)


def test_the_median_ignores_an_outlier() -> None:
    assert median([3.0, 1000.0, 2.0]) == 3.0
    assert median([2.0, 4.0]) == 3.0
    assert median([]) is None


class Accelerator:
    """A device module with four devices, the first of them current; it records what happens on which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.streams = {torch.device("cuda", index): f"stream of {index}" for index in range(4)}
        self.Event = self.event
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> str:
        return self.streams[torch.device("cuda", 0) if device is None else device]

    def synchronize(self, device: Any = None) -> None:
        self.calls.append(("synchronize", device))

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return self

    def record(self, stream: Any = None) -> None:
        self.calls.append(("record", self.current_stream() if stream is None else stream))


def test_a_stream_that_records_a_graph_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    assert not is_capturing(torch.device("cpu"))
    assert not is_capturing(torch.device("cuda"))
    for captures in (False, True):
        monkeypatch.setattr(
            accelerator, "is_current_stream_capturing", lambda captures=captures: captures, raising=False
        )
        assert is_capturing(torch.device("cuda")) is captures
        assert not is_capturing(torch.device("cpu"))


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 0)])
def test_a_device_clock_marks_and_waits_on_its_own_device_whichever_is_current(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(monkeypatch)
    clock = clock_for(torch.device(device))
    clock.mark()
    clock.synchronize()
    assert accelerator.calls == [("record", f"stream of {index}"), ("synchronize", torch.device("cuda", index))]


def test_a_device_clock_marks_in_the_stream_that_is_current_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(monkeypatch)
    clock = clock_for(torch.device("cuda:1"))
    accelerator.streams[torch.device("cuda", 1)] = "a side stream"
    clock.mark()
    assert accelerator.calls == [("record", "a side stream")]


def test_the_first_part_of_a_backward_stays_with_its_sample() -> None:
    """Of three runs the second does not compute its weight gradients apart."""
    clock = FakeClock()
    timer, backward = ActionTimer(clock), Action.parse("0B0")
    for first, rest in ((5.0, 15.0), (None, 20.0), (30.0, 10.0)):
        with timer.timed("phase", backward):
            if first is not None:
                clock.now += first
                timer.input_gradients_done()
            clock.now += rest
    timer.drain()
    assert [sample.first_part for sample in timer.samples("phase", backward)] == [0.25, None, 0.75]
    assert timer.first_parts("phase", backward) == (0.25, 0.75)


class CudaClock(FakeClock):
    device = "cuda"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches NVTX: the name of each range that begins, and "end"."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("end"))
    return found


def test_each_action_is_a_named_range(ranges: list[str]) -> None:
    timer = NvtxTimer(clock := CudaClock())
    for text in ("1F3", "1I3", "1W3", "0B2"):
        run(timer, clock, 3.0, Action.parse(text), share=0.5)
    timer.drain()
    assert ranges == ["F 3 stage 1", "end", "I 3 stage 1", "end", "W 3 stage 1", "end", "B 2 stage 0", "end"]
    assert timer.samples(UPPER, Action.parse("1W3")) == (Sample(0.5, 3.0),)


def test_a_range_ends_if_its_action_fails(ranges: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), NvtxTimer(CudaClock()).timed(UPPER, BACKWARD):
        raise ZeroDivisionError
    assert ranges == ["B 0 stage 0", "end"]


ONE_STAGE = PipelineSchedule.from_text([["0F0", "0F1", "0B0", "0B1"]])


@pytest.mark.parametrize("nvtx", [True, False])
def test_the_setting_names_every_action_of_a_run(nvtx: bool, ranges: list[str], tmp_path: Path) -> None:
    train(controller_of(ONE_STAGE, tmp_path, clock=CudaClock(), nvtx=nvtx), steps=2)
    batch = ["F 0 stage 0", "end", "F 1 stage 0", "end", "B 0 stage 0", "end", "B 1 stage 0", "end"]
    assert ranges == (2 * batch if nvtx else [])


def test_ranges_without_cuda_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvtx is true: allowed is false here; NVTX is for CUDA, not cpu"):
        controller_of(ONE_STAGE, tmp_path, nvtx=True)
