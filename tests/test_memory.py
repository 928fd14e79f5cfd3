"""Memory of a rank: the most that was seen, by phase."""

from __future__ import annotations

import pytest
import torch

import tf_adapters.timing.memory as memory
from tf_adapters.timing.memory import MemoryMeter


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryMeter, list[int]]:
    """A meter, and the bytes that it sees next."""
    held = [0]
    monkeypatch.setattr(memory, "_reader", lambda device: lambda: held[0])
    return MemoryMeter(torch.device("cpu")), held


def test_the_peak_of_each_phase_is_its_own(meter):
    meter, held = meter
    for phase, seen in (("upper", [5, 9, 3]), ("stable", [4, 6])):
        for held[0] in seen:
            meter.look(phase)
    assert [meter.peak_bytes(phase) for phase in ("upper", "stable", "another")] == [9, 6, None]
    meter.clear()
    assert meter.peak_bytes("upper") is None


def test_only_the_first_steps_of_a_phase_are_looked_at(meter):
    meter, held = meter
    for held[0] in range(10):
        meter.look("stable")
        meter.stop_step("stable")
    assert meter.peak_bytes("stable") == 3


def test_on_a_cpu_it_is_the_process():
    meter = MemoryMeter(torch.device("cpu"))
    meter.look("before")
    kept = torch.ones(64 * 2**20)
    meter.look("after")
    grown = meter.peak_bytes("after") - meter.peak_bytes("before")
    assert 0.8 * kept.nbytes < grown < 1.5 * kept.nbytes


def test_a_device_that_does_not_tell_has_no_peaks(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    meter = MemoryMeter(torch.device("meta"))
    meter.look("stable")
    assert meter.peak_bytes("stable") is None
