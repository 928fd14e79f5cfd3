"""What the ways into trainers share, without a trainer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tf_adapters.errors import UnsupportedError
from tf_adapters.trainers.run import TrainerRun, read_state
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS, warmup_left


class Adapter:
    """Writes down what it is asked for; ``wrapped`` says that other code has wrapped what it has set."""

    def __init__(self, wrapped: bool = False, rank: int = 0) -> None:
        self.wrapped, self.detached, self.loaded = wrapped, False, list[Any]()
        self.collectives = SimpleNamespace(rank=rank)
        self.controller = SimpleNamespace(
            state_dict=lambda: {"completed_steps": 3}, load_state_dict=lambda *given: self.loaded.append(given)
        )

    def abandoned_on_error(self) -> Any:
        return nullcontext()

    def detach(self) -> None:
        if self.wrapped:
            raise UnsupportedError("timely_freeze cannot be detached: Model.forward was replaced by other code")
        self.detached = True


def begun(adapter: Any, **more: Any) -> TrainerRun:
    run = TrainerRun()
    run.begin(lambda metrics, warmup_steps: adapter, 5, **more)
    return run


def test_what_others_have_wrapped_does_not_fail_a_training_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    run = begun(Adapter(wrapped=True))
    with pytest.raises(UnsupportedError, match="was replaced by other code"):
        run.detach()
    run.end()
    assert run.adapter is None
    assert "timely_freeze cannot be detached" in caplog.text


def test_a_run_ends_once_and_without_an_adapter_does_nothing() -> None:
    adapter = Adapter()
    for run in (begun(adapter), begun(None)):
        run.end()
        run.end()
        assert run.adapter is None
        assert run.state_text() is None
    assert adapter.detached


def test_a_state_that_was_written_is_read(tmp_path: Path) -> None:
    begun(Adapter()).write_state(tmp_path / "checkpoint-3")
    adapter = Adapter()
    begun(adapter, saved=lambda: read_state(tmp_path / "checkpoint-3"))
    assert adapter.loaded == [({"completed_steps": 3}, 5)]


def test_only_the_first_rank_writes_a_state(tmp_path: Path) -> None:
    begun(Adapter(rank=1)).write_state(tmp_path)
    begun(None).write_state(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "", "{", "\udc80"])
def test_a_state_that_cannot_be_read_begins_freezing_anew(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "timely_freeze.json").write_bytes(text.encode(errors="surrogateescape"))
    adapter = Adapter()
    begun(adapter, saved=lambda: read_state(tmp_path))
    assert adapter.loaded == [(None, 5)]


def test_a_disk_that_is_full_costs_the_state_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    begun(Adapter()).write_state(tmp_path / "file")
    assert "the state cannot be saved in" in caplog.text


def test_figures_have_the_trainers_names() -> None:
    run = begun(Adapter())
    run({"step_ms": 4.0})
    assert run.figures == {"timely_freeze/step_ms": 4.0}
    assert json.loads(run.state_text() or "") == {"completed_steps": 3}


@pytest.mark.parametrize(
    ("length", "done", "per_step", "left"),
    [(0, 0, 8, DEFAULT_WARMUP_STEPS), (80, 0, 8, 10), (80, 12, 8, 9), (80, 96, 8, 0), (3, 1, 1, 2)],
)
def test_what_is_left_of_a_warm_up(length: int, done: int, per_step: int, left: int) -> None:
    scheduler = SimpleNamespace(lr_warmup_steps=length, num_steps=done)
    assert warmup_left(scheduler, per_step) == left
