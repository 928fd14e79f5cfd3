"""The hot path on a GPU: nothing waits for the device, nothing is slower, and events tell what kernels take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.parts import WAYS, Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import Training
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Kind
from tf_adapters.testing.paired import on_and_off

PROFILED = 3  # steps


class Reads(TorchDispatchMode):
    """On a CPU: refuses what would wait for a GPU, reading a tensor or a size that depends on its values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function.overloadpacket) in ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"):
            raise RuntimeError(f"{function} would wait for a device")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waiting(options: Options) -> Iterator[None]:
    """Raise RuntimeError if the block waits for the device."""
    if not options.cuda:
        with Reads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(options: Options, step: Callable[[], None]) -> str:
    """Return the error about the first wait of a step; "" if the step never waits."""
    try:
        with no_waiting(options):
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0][:160]
    return ""


def run(options: Options) -> list[Check]:
    """Each way's stable steps, in one process."""
    checks = [waiting(options, "host alone", None)]
    for name, settings in WAYS.items():
        checks.append(waiting(options, name, settings))
    checks += [overhead(options, name, settings) for name, settings in WAYS.items()]
    return [*checks, *kernels(options)]


def waiting(options: Options, name: str, settings: dict[str, Any] | None) -> Check:
    """Check if a step waits for the device: the host's step (not judged), or one in stable freezing."""
    training = Training(options)
    if settings is not None:
        training.attach_planned(0.5, **settings)
    for _ in range(3):
        training.step()
    found = waits(options, training.step)
    return Check(
        f"a step waits for the device, {name}", float(bool(found)), most=None if settings is None else 0, note=found
    )


def overhead(options: Options, name: str, settings: dict[str, Any]) -> Check:
    """Median of pairs of steps, attached at freeze ratio 0 to alone."""
    training = Training(options)
    pairs = 4 if options.tiny else 40
    training.attach_planned(0.0, **settings)
    for _ in range(3):
        training.step()

    def attach() -> None:
        training.attach_planned(0.0, **settings)
        training.step()  # the first one makes what later ones use again

    def detach() -> None:
        training.detach()
        training.step()

    measured = on_and_off(
        training.step,
        attach=attach,
        detach=detach,
        phase="stable",
        pairs=pairs,
    )
    most = 0.5 if options.judged and name == "tensors" else None  # the other ways compute differently, also at 0
    return Check(f"slower at freeze ratio 0, {name}", 100 * (measured.ratio("stable") - 1), "%", most=most)


def kernels(options: Options) -> list[Check]:
    """Times of actions, from our events, to the sum of all kernels of the same batches."""
    training = Training(options)
    adapter = training.attach_planned(0.5)
    for _ in range(3):
        training.step()
    differences = []
    for _ in range(1 if options.tiny else PROFILED):
        with profile(activities=[ProfilerActivity.CUDA if options.cuda else ProfilerActivity.CPU]) as profiled:
            training.batch()
            if options.cuda:
                torch.cuda.synchronize()
        training.update()
        timer = adapter.controller.timer
        timer.drain(wait=True)
        _, trace = timer.traces(Phase.STABLE, adapter.controller.state.microbatches)[-1]
        ours = sum(interval.end_ms - interval.start_ms for interval in trace.values())
        differences.append(100 * (ours / kernel_ms(profiled, options) - 1))
        assert {action.kind for action in trace} == {Kind.FORWARD, Kind.BACKWARD}
    middle = statistics.median(differences)
    return [
        Check("events over the kernels' sum", middle, "%", **({"most": 2.0, "least": -2.0} if options.judged else {}))
    ]


def kernel_ms(profiled: Any, options: Options) -> float:
    """All kernels' times, ms; on a CPU those of all operators."""
    if options.cuda:
        on_device = [
            event
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        return sum(event.self_device_time_total for event in on_device) / 1e3
    return sum(e.self_cpu_time_total for e in profiled.key_averages()) / 1e3


PART = Part("hot path: no waiting for the device, overhead at ratio 0, events against kernels", run, no_gpu)
