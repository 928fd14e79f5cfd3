"""What a DeepSpeed config says before there is an engine. DeepSpeed itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tf_adapters.hosts.support import Problem, first_problem

Config = Mapping[str, Any]

FP16 = "fp16 is not supported; use bf16 or fp32"
FP16_AUTOCAST = (
    "torch_autocast in fp16 is not supported: each stage scales the loss by itself and skips updates alone; "
    'use "dtype": "bfloat16"'
)
APEX = 'mixed precision by NVIDIA Apex ("amp") is not supported; use bf16 or fp32'
OFFLOAD = "ZeRO's optimizer offload is not supported; remove zero_optimization.offload_optimizer"
_FP16_NAMES = ("fp16", "float16", "half", "torch.float16")
_UNTESTED_OPTIMIZERS = ("onebit", "zerooneadam", "muon")
_SCHEDULER_STEPS = 1000
"""DeepSpeed's default of ``warmup_num_steps``."""


def config_problem(config: Config) -> Problem:
    """Return the first problem for which ``attach`` refuses this config, as far as the config alone shows it."""
    zero, autocast = _part(config, "zero_optimization"), _part(config, "torch_autocast")
    stage = zero.get("stage", 0)
    offload = _part(zero, "offload_optimizer").get("device", "none")
    return first_problem(
        {
            FP16: _part(config, "fp16").get("enabled") is True,
            FP16_AUTOCAST: autocast.get("enabled") is True and autocast.get("dtype") in _FP16_NAMES,
            APEX: _part(config, "amp").get("enabled") is True,
            OFFLOAD: offload != "none" or zero.get("cpu_offload") is True,
            f"DeepSpeed's pipeline engine does not run ZeRO stage {stage}; use stage 0 or 1": stage in (2, 3),
        }
    ) or untested_problem(str(_part(config, "optimizer").get("type", "")))


def untested_problem(optimizer: str) -> Problem:
    """Return a problem if an optimizer's name says that its updates were never tested with held parameters."""
    untested = any(part in optimizer.lower() for part in _UNTESTED_OPTIMIZERS)
    return (
        f"the optimizer {optimizer} is not supported; use Adam, AdamW, SGD or another plain one" if untested else None
    )


def clipping_warning(clipping: float) -> str:
    return (
        f"gradient_clipping is {clipping:g} with ZeRO stage 0 in fp32: DeepSpeed's pipeline "
        "engine then clips by the first stage's norm alone, with or without freezing; use ZeRO stage 1"
    )


def config_warnings(config: Config) -> list[str]:
    """Return warnings about faults of the host itself, as far as the config alone shows them."""
    clipping, stage = config.get("gradient_clipping", 0.0), _part(config, "zero_optimization").get("stage", 0)
    in_bf16 = any(_part(config, name).get("enabled") is True for name in ("bf16", "bfloat16"))
    if stage != 0 or in_bf16 or not isinstance(clipping, (int, float)) or clipping <= 0:
        return []
    return [clipping_warning(clipping)]


def scheduler_warmup(config: Config) -> int | None:
    """Return the warm-up of the config's scheduler in steps; None if the config names no scheduler that has one."""
    scheduler = _part(config, "scheduler")
    if not str(scheduler.get("type", "")).startswith("Warmup"):
        return None
    steps = _part(scheduler, "params").get("warmup_num_steps", _SCHEDULER_STEPS)
    return max(2, steps) if isinstance(steps, int) else None


def _part(config: Config, name: str) -> Config:
    """Return an object in the config; an empty one if it is missing or no object."""
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}
