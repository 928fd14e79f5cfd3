"""Memory of a rank: the most that was seen, by phase, and the most that another order takes."""

from __future__ import annotations

import pytest
import torch

import tf_adapters.measuring.memory as memory
from tf_adapters.measuring.memory import HeldMemory, MemoryMeter
from tf_adapters.schedule.deferral import split
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.orders import one_forward_one_backward

FORWARD = Action.parse("0F0")
BASE, IN_FLIGHT, WAITING, GRADIENTS = 1_000, 70, 20, 300


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryMeter, list[int]]:
    """A meter, and the bytes that it sees next."""
    held = [0]
    monkeypatch.setattr(memory, "_reader", lambda device: lambda: held[0])
    return MemoryMeter(torch.device("cpu")), held


def test_the_peak_of_each_phase_is_its_own(meter):
    meter, held = meter
    for phase, seen in (("upper", [5, 9, 3]), ("stable", [4, 6])):
        meter.start_step()
        for held[0] in seen:
            meter.look(phase, FORWARD)
        meter.stop_step(phase)
    assert [meter.peak_bytes(phase) for phase in ("upper", "stable", "another")] == [9, 6, None]
    meter.clear()
    assert meter.peak_bytes("upper") is None


def test_only_the_first_steps_of_a_phase_are_looked_at(meter):
    meter, held = meter
    for held[0] in range(10):
        meter.start_step()
        meter.look("stable", FORWARD)
        meter.stop_step("stable")
    assert meter.peak_bytes("stable") == 3


def test_a_step_that_failed_does_not_count(meter):
    meter, held = meter
    for held[0] in (9, 4):
        meter.start_step()
        meter.look("stable", FORWARD)
    meter.stop_step("stable")
    assert meter.peak_bytes("stable") == 4


def bytes_after(row: list[str]) -> list[int]:
    """What a rank with one stage holds after each action."""
    in_flight = waiting = gradients = 0
    held = []
    for text in row:
        in_flight += {"F": 1, "B": -1, "I": -1}.get(text[1], 0)
        waiting += {"I": 1, "W": -1}.get(text[1], 0)
        gradients = GRADIENTS if text[1] in "BW" else gradients
        held.append(BASE + in_flight * IN_FLIGHT + waiting * WAITING + gradients)
    return held


def watched(meter: MemoryMeter, held: list[int], row: list[str]) -> HeldMemory:
    meter.start_step()
    for text, held[0] in zip(row, bytes_after(row), strict=True):
        meter.look("upper", Action.parse(text))
    meter.stop_step("upper")
    model = meter.held("upper")
    assert model is not None
    return model


def test_what_another_order_holds_follows_from_what_the_hosts_order_held(meter):
    row = ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"]
    model = watched(*meter, row)
    assert (model.base, model.in_flight[0], model.waiting[0], model.gradients[0]) == pytest.approx(
        (BASE, IN_FLIGHT, WAITING, GRADIENTS)
    )
    other = ["0F0", "0F1", "0F2", "0I0", "0I1", "0W0", "0I2", "0W1", "0W2"]
    assert model.peak_bytes(map(Action.parse, other)) == max(bytes_after(other))


def test_no_measured_value_is_above_the_model(meter):
    meter, held = meter
    row = [f"0{kind}{m}" for m in range(4) for kind in "FIW"]
    seen = [bytes_ + 2 * place for place, bytes_ in enumerate(bytes_after(row))]  # something else grows
    for text, held[0] in zip(row, seen, strict=True):
        meter.look("upper", Action.parse(text))
    meter.stop_step("upper")
    model = meter.held("upper")
    assert (max(seen), model.peak_bytes(map(Action.parse, row))) == (1_388, 1_391)
    for end in range(1, len(row) + 1):
        assert model.peak_bytes(map(Action.parse, row[:end])) >= max(seen[:end])


def test_sent_tensors_stay_to_the_end_of_the_batch_if_the_host_keeps_them(meter):
    _, held = meter
    sent = {}
    meter = MemoryMeter(torch.device("cpu"), sent)
    model = watched(meter, held, ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"])
    sent |= {(0, Kind.FORWARD): 6, (0, Kind.BACKWARD): 5}  # a host that fills it in later
    keeping = meter.held("upper")
    row = ["0F0", "0I0", "0F1", "0I1", "0W0", "0F2", "0I2", "0W1", "0W2"]
    peaks = [one.peak_bytes(map(Action.parse, row)) for one in (model, keeping)]
    assert peaks == [BASE + GRADIENTS + IN_FLIGHT + WAITING, BASE + GRADIENTS + IN_FLIGHT + WAITING + 2 * 11]
    assert keeping.needed_bytes(2) - model.needed_bytes(2) == pytest.approx(3 * 11)


def test_a_backward_whose_halves_are_seen_apart_holds_what_waits_in_its_midst(meter):
    meter, held = meter
    steps = [("0F0", 1_070), ("0I0", 1_020), ("0B0", 1_300), ("0F1", 1_370), ("0I1", 1_320), ("0B1", 1_300)]
    for text, held[0] in steps:
        meter.look("upper", Action.parse(text))
    meter.stop_step("upper")
    model = meter.held("upper")
    assert model.waiting[0] == pytest.approx(WAITING)
    assert meter.peak_bytes("upper") == 1_370
    assert model.peak_bytes(map(Action.parse, ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"])) == 1_320


def test_several_stages_of_a_rank_hold_what_is_theirs():
    model = HeldMemory(10.0, {0: 5.0, 1: 7.0}, waiting={0: 1.0, 1: 2.0}, gradients={0: 100.0, 1: 200.0})
    row = ["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"]
    assert model.peak_bytes(map(Action.parse, row)) == 10 + 300  # both have gradients at the end


def test_how_many_microbatches_fit():
    one = HeldMemory(BASE, {0: 70.0}, waiting={0: 20.0}, gradients={0: 300.0})
    for count in (0, 1, 5):
        limit = BASE + 300.0 + 70.0 * count
        assert one.most_microbatches(limit) == count
        assert one.most_microbatches(limit + 69.0) == count
    assert one.most_microbatches(0.0) == 0
    two = HeldMemory(BASE, {0: 70.0, 1: 10.0}, waiting={0: 20.0, 1: 90.0}, gradients={0: 300.0, 1: 100.0})
    assert two.most_microbatches(BASE + 400.0 + 180.0) == 2  # as if all were of the stage that holds most
    assert HeldMemory(BASE, {0: -1.0}, waiting={0: -2.0}, gradients={0: 0.0}).most_microbatches(1e9) == 0


def test_a_row_of_as_many_microbatches_as_fit_stays_within_the_limit():
    row = [Action.parse(f"0F{m}") for m in range(7)] + [Action.parse(f"0{k}{m}") for m in range(7) for k in "IW"]
    one = HeldMemory(BASE, {0: 70.0}, waiting={0: 20.0}, gradients={0: 300.0})
    assert one.most_microbatches(one.peak_bytes(row)) <= 7
    assert one.peak_bytes(row) <= BASE + 300.0 + 7 * 70.0


def test_a_meter_says_how_many_fit_if_the_limit_or_the_device_is_known(meter, monkeypatch):
    meter, held = meter
    watched(meter, held, ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"])
    limit = BASE + GRADIENTS + 5 * IN_FLIGHT + 1
    assert meter.most_microbatches("upper", limit, 2) == 5
    assert meter.most_microbatches("upper", None, 2) is None  # a CPU's memory is not ours alone
    assert meter.most_microbatches("another", limit, 2) is None
    peak = meter.peak_bytes("upper")
    assert meter.most_microbatches("upper", peak, 2) == 2  # although each is counted at its largest
    assert meter.most_microbatches("upper", peak - 1, 2) < 2
    needed = meter.needed_bytes("upper", 3)
    assert [meter.most_microbatches("upper", needed + more, 0) for more in (1, -1)] == [3, 2]
    assert meter.needed_bytes("another", 3) is None
    monkeypatch.setattr(memory, "_capacity_bytes", lambda device: float(limit))
    monkeypatch.setattr(memory, "_most_allocated", lambda device: peak + 2 * IN_FLIGHT)
    assert meter.most_microbatches("upper", None, 2) == 3  # an action fills the rest in its midst


def test_tensors_may_fill_a_share_of_a_device(monkeypatch):
    class Module:
        mem_get_info = staticmethod(lambda device: (600, 1_000))
        memory_reserved = staticmethod(lambda device: 200)
        max_memory_allocated = staticmethod(lambda device: 150)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert memory._capacity_bytes(torch.device("cuda")) == pytest.approx(0.9 * 800)
    assert memory._most_allocated(torch.device("cuda")) == 150
    assert memory._capacity_bytes(torch.device("cpu")) is None
    assert memory._most_allocated(torch.device("cpu")) == 0


def test_a_split_order_is_the_hosts_in_memory():
    model = HeldMemory(0.0, dict.fromkeys(range(4), 5.0), waiting=dict.fromkeys(range(4), 1.0), gradients={})
    schedule: PipelineSchedule = one_forward_one_backward(4, 8)
    for whole, halves in zip(schedule.ranks, split(schedule).ranks, strict=True):
        assert model.peak_bytes(whole) == model.peak_bytes(halves) == 5 * (4 - whole[0].stage)


def test_on_a_cpu_it_is_what_the_process_has_been_given():
    meter = MemoryMeter(torch.device("cpu"))
    meter.look("before", FORWARD)
    meter.stop_step("before")
    kept = torch.ones(64 * 2**20)
    meter.look("after", FORWARD)
    meter.stop_step("after")
    grown = meter.peak_bytes("after") - meter.peak_bytes("before")
    assert 0.9 * kept.nbytes < grown < 1.1 * kept.nbytes


def test_a_c_library_that_does_not_tell_leaves_the_resident_pages(monkeypatch):
    monkeypatch.setattr(memory, "_heap_reader", lambda: None)
    meter = MemoryMeter(torch.device("cpu"))
    meter.look("stable", FORWARD)
    meter.stop_step("stable")
    assert meter.peak_bytes("stable") > 2**20


def test_a_device_that_does_not_tell_has_no_peaks(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    meter = MemoryMeter(torch.device("meta"))
    meter.look("stable", FORWARD)
    meter.stop_step("stable")
    assert meter.peak_bytes("stable") is None
    assert meter.held("stable") is None
