"""Emulated devices: how long operations are made to last, what is counted, and that nobody takes one for a GPU."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from clocks import Time
from torch_oracle import check_oracle
from torch_ranks import Case, pool, train

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.timer import clock_for
from tf_adapters.report.layout import panels_of
from tf_adapters.report.page import as_text
from tf_adapters.report.schema import Report
from tf_adapters.report.terminal import page
from tf_adapters.testing.emulated_device import EmulatedDevice, main

CPU = torch.device("cpu")


def test_products_last_as_long_as_their_flops_forward_and_backward():
    time, layer, x = Time(), torch.nn.Linear(4, 8, bias=False), torch.ones(3, 4, requires_grad=True)
    with time.device(rate=1e3) as device:
        layer(x).sum().backward()
    of_product = 2 * 3 * 4 * 8 / 1e3
    assert device.operations == 3  # the output, the gradients of the weight and of the input
    assert device.asked_s == pytest.approx(3 * of_product)
    assert time.slept == pytest.approx([of_product] * 3)
    assert device.error == 0.0


def test_operations_of_other_sizes_are_counted_anew():
    time = Time()
    with time.device(rate=1e3):
        for rows in (1, 2, 1):
            torch.mm(torch.ones(rows, 4), torch.ones(4, 8))
        for stride in (1, 2):
            torch.nn.functional.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 1), stride=stride)
    assert time.slept == pytest.approx([0.064, 0.128, 0.064, 0.010, 0.006])


def test_what_one_operation_oversleeps_the_next_one_makes_up_for():
    time, x = Time(oversleep=1e-3), torch.ones(10, 10)
    with time.device(rate=2e5) as device:  # 10 ms each
        for _ in range(5):
            torch.mm(x, x)
    assert time.slept[0] == pytest.approx(0.010)
    assert time.slept[1:] == pytest.approx([0.009] * 4)
    assert time.now == pytest.approx(0.051)
    assert device.error == 0.0


def test_what_is_computed_between_operations_is_hidden_behind_them_and_waiting_is_not():
    time, x = Time(), torch.ones(10, 10)
    with time.device(rate=2e5) as device:  # 10 ms each
        torch.mm(x, x)
        time.compute(0.0015)
        torch.mm(x, x)
        assert time.now == pytest.approx(0.020)
        time.now += 0.5  # for a message, say
        torch.mm(x, x)
        assert time.now == pytest.approx(0.530)
        time.compute(0.1)  # an optimizer, say
        torch.mm(x, x)
        torch.mm(torch.ones(20, 10), x)  # 20 ms
        time.compute(0.1)
        torch.mm(torch.ones(20, 10), x)
    assert time.slept == pytest.approx([0.010, 0.0085, 0.010, 0.020, 0.010])
    assert device.error == 0.0


def test_a_processor_that_cannot_keep_up_is_told():
    time, x = Time(oversleep=0.05), torch.ones(10, 10)
    with time.device(rate=2e5) as device:
        for _ in range(5):
            torch.mm(x, x)
    assert device.error > 1.0
    assert "could not keep up" in device.summary()


def test_jitter_repeats_with_its_seed_and_keeps_the_mean():
    def slept(seed: int) -> list[float]:
        time, x = Time(), torch.ones(10, 10)
        with time.device(rate=2e5, jitter=0.1, seed=seed):
            for _ in range(200):
                torch.mm(x, x)
        return time.slept

    assert slept(1) == slept(1)
    assert slept(1) != slept(2)
    assert sum(slept(1)) / 200 == pytest.approx(0.010, rel=0.03)  # four standard errors of the mean


def test_a_device_keeps_its_speed_for_a_while():
    time, x = Time(), torch.ones(10, 10)
    with time.device(rate=2e5, jitter=0.3, jitter_ms=35.0):
        for _ in range(40):
            torch.mm(x, x)
    lengths = [round(1e3 * slept, 6) for slept in time.slept]
    runs = [len(list(same)) for _, same in itertools.groupby(lengths)]
    assert runs == [4] * 10  # the first operation after 35 ms of work draws again, however long they took


def test_it_has_a_name_while_it_is_active():
    assert clock_for(CPU).device == "cpu"
    with Time().device(1.0):
        assert clock_for(CPU).device == "emulated"
    assert clock_for(CPU).device == "cpu"


@pytest.mark.parametrize(("rate", "jitter", "word"), [(0.0, 0.0, "rate"), (-1.0, 0.0, "rate"), (1.0, 1.0, "jitter")])
def test_wrong_arguments_are_one_line(rate, jitter, word):
    with pytest.raises(ConfigError, match=rf"^{word} is .*: allowed is [^\n]*$"):
        EmulatedDevice(rate, jitter=jitter)


def test_a_script_runs_unmodified(tmp_path, monkeypatch, capsys, caplog):
    script = tmp_path / "script.py"
    script.write_text("import sys, torch\ntorch.mm(torch.ones(2, 2), torch.ones(2, 2))\nprint('ran', sys.argv[1:])\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with caplog.at_level("INFO", logger="tf_adapters"):
        main(["--rate", "1e6", str(script), "--layers", "4"])
    assert capsys.readouterr().out == "ran ['--layers', '4']\n"
    assert "emulated device: 1 operations" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast", "x.py"], "'fast': allowed are numbers of FLOP/s above 0"),
        (["--rate", "0", "x.py"], "allowed are numbers of FLOP/s above 0"),
        (["--rate", "1e9", "--jitter", "2", "x.py"], "jitter is 2.0: allowed is a number from 0 to below 1"),
        (["--rate", "1e9", "--jitter-ms", "-1", "x.py"], "jitter_ms is -1.0: allowed is a number of ms from 0"),
        (["--rate", "1e9"], "nothing to run"),
    ],
)
def test_wrong_options_of_the_command_are_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_of_it:
        main(arguments)
    assert exit_of_it.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def train_emulated(case: Case) -> dict:
    with EmulatedDevice(1e8):
        return train(case)


@pytest.mark.distributed
def test_four_ranks_on_emulated_devices(tmp_path: Path):
    section = {"monitoring_steps": 4, "max_freeze_ratio": 0.6, "replan_interval": 1, "replan_threshold": 0.0}
    case = Case(ranks=4, section=section, steps=10, output_dir=str(tmp_path))
    ranks = pool(4).run(train_emulated, case)
    check_oracle(case, ranks)
    assert all(rank["failure"] is None for rank in ranks)
    assert [step["masks"] for step in ranks[0]["steps"]] == [step["masks"] for step in ranks[3]["steps"]]
    path = tmp_path / "timely_freeze" / "report.json"
    assert json.loads(path.read_text())["host"]["device"] == "emulated"
    report = Report.read(path)
    assert "emulated devices" in as_text(page(report))
    assert all(panel.title.startswith("emulated devices") for panel in panels_of(report))


def test_real_time_is_given_back():
    policy = os.sched_getscheduler(0)
    with EmulatedDevice(1e12, real_time=True):
        assert os.sched_getscheduler(0) in (os.SCHED_RR, policy)  # where the system does not allow it, it stays
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
