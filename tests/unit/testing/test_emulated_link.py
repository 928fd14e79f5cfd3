"""Emulated links: when a message is usable, what passes through, and that the hosts' transfers go over them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import Time
from torch_oracle import check_oracle
from torch_ranks import Case, pool, train

from tf_adapters.errors import ConfigError
from tf_adapters.measuring.timer import clock_for
from tf_adapters.testing.emulated_device import main
from tf_adapters.testing.emulated_link import EmulatedLinks, Link

SLOW = Link(latency_ms=30.0, bytes_per_s=1e5)


def links_on(clock: Time, **settings: Any) -> EmulatedLinks:
    return EmulatedLinks(clock=lambda: clock.now, sleep=clock.sleep, **settings)


def test_a_message_leaves_when_the_link_is_free_and_then_takes_its_latency():
    clock = Time()
    links = links_on(clock, default=SLOW)
    assert links.arrival(1, SLOW, 1000) == pytest.approx((0.0, 0.010 + 0.030))
    assert links.arrival(1, SLOW, 1000) == pytest.approx((0.0, 0.020 + 0.030))  # behind the first, latencies overlap
    assert links.arrival(2, SLOW, 1000) == pytest.approx((0.0, 0.010 + 0.030))  # another link
    clock.now = 1.0
    assert links.arrival(1, SLOW, 1000) == pytest.approx((1.0, 1.010 + 0.030))


def test_a_receiver_waits_for_what_is_left_of_the_way():
    clock = Time(now=0.025)
    links = links_on(clock)
    links.await_arrival(sent_at=0.0, arrives_at=0.040, waiting_since=0.025, size=1000)
    assert clock.slept == pytest.approx([0.015])
    links.await_arrival(sent_at=0.0, arrives_at=0.030, waiting_since=0.040, size=1000)  # it came while computing
    assert len(clock.slept) == 1
    links.await_arrival(sent_at=0.0, arrives_at=0.030, waiting_since=0.020, size=1000)  # it came too late
    assert (links.messages, links.message_bytes) == (3, 3000)
    assert links.asked_s == pytest.approx(0.100)
    assert links.late_s == pytest.approx(0.010)
    assert "3 messages received, 3,000 bytes, 33.333 ms under way on average and 3.333 ms late" in links.summary()


def test_an_edge_has_its_link_both_ways():
    links = EmulatedLinks(Link(1.0), {(2, 1): SLOW})
    assert links.between(1, 2) == links.between(2, 1) == SLOW
    assert links.between(0, 1) == Link(1.0)
    assert EmulatedLinks(edges={(1, 2): SLOW}).between(0, 1) is None


def test_it_has_a_name_and_puts_back_what_it_replaced():
    before = [getattr(dist, name) for name in ("isend", "irecv", "send", "recv")]
    with EmulatedLinks(SLOW):
        assert clock_for(torch.device("cpu")).device == "emulated"
        assert dist.isend is dist.distributed_c10d.isend is not before[0]
    assert [getattr(dist, name) for name in ("isend", "irecv", "send", "recv")] == before
    assert clock_for(torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("latency_ms", (-1.0,)), ("latency_ms", (float("nan"),)), ("bytes_per_s", (0.0, 0.0))],
)
def test_wrong_links_are_one_line(field, arguments):
    with pytest.raises(ConfigError, match=rf"^{field} is .*: allowed is [^\n]*$"):
        Link(*arguments)


def test_a_script_runs_unmodified_over_links(tmp_path, monkeypatch, caplog):
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\nassert 'EmulatedLinks' in dist.isend.__qualname__\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with caplog.at_level("INFO", logger="tf_adapters"):
        main(["--rate", "1e6", "--link", "0.5:1e9", "--link", "1-2=5", str(script)])
    assert "emulated links: no message received" in caplog.text


@pytest.mark.parametrize("link", ["fast", "-1", "1:0", "1-1=5", "1=5", "-1-2=5", "1:2:3"])
def test_wrong_links_of_the_command_are_one_line(link, capsys):
    with pytest.raises(SystemExit) as exit_of_it:
        main(["--rate", "1e6", f"--link={link}", "x.py"])
    assert exit_of_it.value.code == 2
    assert f"{link!r}: allowed is a latency in ms from 0" in capsys.readouterr().err.splitlines()[-1]


def exchange() -> dict[str, Any]:
    """Every way to send that the hosts use, from rank 0 to rank 1; when each message was sent or could be used."""
    rank = dist.get_rank()
    sent = [torch.arange(100, dtype=torch.float32) + number for number in range(4)] + [torch.tensor(True)]
    got = [torch.zeros_like(tensor) for tensor in sent]
    times = []
    with EmulatedLinks(SLOW) as links:
        if rank == 0:
            times = [time.monotonic()] * 2
            works = [dist.isend(sent[0], 1), dist.isend(sent[1], 1)]
            times.append(time.monotonic())
            dist.send(sent[2], dst=1)
            works += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1) for tensor in sent[3:]])
            for work in works:
                work.wait()
            dist.send_object_list([{"shape": (2, 3)}], dst=1)
        else:
            works = [dist.irecv(got[0], 0), dist.irecv(got[1], 0)]
            for work in works:
                assert work.wait()
                assert work.wait()
                times.append(time.monotonic())
            assert dist.recv(got[2], src=0) == 0
            times.append(time.monotonic())
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 0) for tensor in got[3:]]):
                work.wait()
            objects: list[Any] = [None]
            dist.recv_object_list(objects, src=0)
            assert objects == [{"shape": (2, 3)}]
            assert all(torch.equal(one, other) for one, other in zip(got, sent, strict=True))
        dist.barrier()
    return {"times": times, "messages": links.messages}


def train_over_links(case: Case) -> dict[str, Any]:
    with EmulatedLinks(Link(1.0, 1e6)) as links:
        return train(case) | {"messages": links.messages}


@pytest.mark.distributed
def test_messages_between_ranks():
    sender, receiver = pool(2).run(exchange)
    assert receiver["messages"] >= 6
    way = [0.034, 0.038, 0.034]  # 400 bytes each; the second one leaves after the first
    for sent_at, used_at, least in zip(sender["times"], receiver["times"], way, strict=True):
        assert used_at - sent_at >= least - 1e-9  # what the link model promises; there is no upper limit here


@pytest.mark.distributed
def test_a_pipeline_trains_the_same_over_links(tmp_path: Path):
    case = Case(
        section={"max_freeze_ratio": 0.6, "replan_interval": 1, "replan_threshold": 0.0},
        steps=6,
        output_dir=str(tmp_path),
    )
    ranks = pool(2).run(train_over_links, case)
    check_oracle(case, ranks)
    assert all(rank["failure"] is None for rank in ranks)
    assert all(rank["messages"] >= case.steps * case.microbatches for rank in ranks)
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["host"]["device"] == "emulated"
