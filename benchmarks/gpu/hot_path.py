"""The hot path on a GPU: a step never waits for the device and is not slower; events measure the kernels' time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.parts import WAYS, Check, Options, Part, no_gpu
from benchmarks.gpu.pipeline import TINY, Training
from tf_adapters.measuring.phase import Phase
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.testing import force_order
from tf_adapters.testing.paired import on_and_off

PROFILED = 3  # steps


class Reads(TorchDispatchMode):
    """Raise on a CPU where a GPU would be waited for: to read a tensor, or a size that depends on its values."""

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


def run(options: Options) -> Iterator[Check]:
    """Check each way's stable steps, in one process."""
    yield waiting(options, "host alone", None)
    for name, settings in WAYS.items():
        yield waiting(options, name, settings)
    yield from kernels(options)
    yield from launches(options)
    yield per_tap(options)
    for name, settings in WAYS.items():
        yield overhead(options, name, settings)


def waiting(options: Options, name: str, settings: dict[str, Any] | None) -> Check:
    """Check whether a step waits for the device: the host's step (not judged), or a step in stable freezing."""
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
    """Return how much longer a step takes with a way at freeze ratio 0 than alone."""
    training = Training(options)
    training.attach_planned(0.0, **settings)
    for _ in range(3):
        training.step()

    def attach() -> None:
        training.attach_planned(0.0, **settings)
        training.step()  # the first one makes what later ones use again

    def detach() -> None:
        training.detach()
        training.step()

    pairs = 4 if options.tiny else 20
    measured = on_and_off(training.step, attach=attach, detach=detach, phase="stable", pairs=pairs)
    most = 0.5 if options.judged and name == "tensors" else None  # the other ways compute differently, also at 0
    return Check(f"slower at freeze ratio 0, {name}", 100 * (measured.ratio("stable") - 1), "%", most=most)


def per_tap(options: Options) -> Check:
    """Return the host's time for each layer and microbatch whose weight gradient is deferred.

    Tensors are tiny, so that a step takes as long as its Python code and its launches, on a GPU too.
    """
    training = Training(options, TINY)
    deferred(training)

    def detach() -> None:
        training.detach()
        training.step()

    pairs = on_and_off(
        training.step,
        attach=lambda: deferred(training),
        detach=detach,
        phase="stable",
        pairs=4 if options.tiny else 40,
    )
    linear = sum(isinstance(layer, torch.nn.Linear) for module in training.modules for layer in module.modules())
    longer_ms = statistics.median(pairs.attached["stable"]) - statistics.median(pairs.alone["stable"])
    return Check("longer for each tap", 1e3 * longer_ms / (linear * TINY.microbatches), "us")


def launches(options: Options) -> Iterator[Check]:
    """Yield how many kernels a step launches with each way; on a CPU how many operators it runs."""
    ways: dict[str, Callable[[Training], Any]] = {
        "host alone": lambda training: None,
        "tensors, half frozen": lambda training: training.attach_planned(0.5),
        "deferred, nothing frozen": deferred,
        "tokens, half sampled": lambda training: training.attach_planned(0.5, **WAYS["tokens"]),
    }
    for name, prepare in ways.items():
        training = Training(options, TINY)
        prepare(training)
        for _ in range(3):
            training.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            training.step()
        names = ("cudaLaunchKernel", "cuLaunchKernel") if options.cuda else ("aten::",)
        count = sum(event.count for event in profiled.key_averages() if event.key.startswith(names))
        yield Check(f"launches of a step, {name}", count)


def deferred(training: Training) -> None:
    """Attach, and run every W one microbatch late: a single rank never idles, so its own plan would defer nothing."""
    controller = training.attach(goal="exact").controller
    order: list[Action] = []
    late: list[Action] = []
    for action in controller.schedule.ranks[0]:
        if action.kind is Kind.FORWARD:
            order.append(action)
            continue
        order += [Action(action.stage, Kind.INPUT_GRAD, action.microbatch), *late]
        late = [Action(action.stage, Kind.WEIGHT_GRAD, action.microbatch)]
    force_order(controller, PipelineSchedule((tuple(order + late),)))
    training.step()


def kernels(options: Options) -> list[Check]:
    """Compare the actions' times, from our events, with the sum of all kernels of the same batches."""
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
    """Return the sum of all kernels' times in ms; on a CPU that of all operators."""
    if options.cuda:
        on_device = [
            event
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        return sum(event.self_device_time_total for event in on_device) / 1e3
    return sum(e.self_cpu_time_total for e in profiled.key_averages()) / 1e3


PART = Part(
    title="hot path: no waiting for the device, launches, time for each tap, overhead at ratio 0, events and kernels",
    run=run,
    missing=no_gpu,
    minutes=3.0,
)
