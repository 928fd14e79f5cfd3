"""Locate the parameters of a flat-partition optimizer (ZeRO stage 1, BF16_Optimizer) in this rank's fp32 partition.

DeepSpeed makes each parameter a view of its group's flat buffer, and each rank updates one part of the buffer. The
parameter's address therefore gives its position for any order of the group. ``_hp_mapping`` does not: it assumes the
group's original order, also under ``round_robin_gradients``.
Source: deepspeed/runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that this rank updates.

    ``group`` is the parameter group. The part begins at ``start`` in the group's fp32 partition and at ``begin`` in the
    parameter, and has ``numel`` elements.
    """

    group: int
    start: int
    begin: int
    numel: int


def flat_partitions(optimizer: Any) -> list[torch.Tensor]:
    """Return this rank's fp32 partition of each parameter group."""
    if isinstance(optimizer, BF16_Optimizer):
        return optimizer.fp32_groups_flat_partition  # type: ignore[no-any-return]
    return optimizer.single_partition_of_fp32_groups  # type: ignore[no-any-return]


def fragments(optimizer: Any) -> dict[int, Fragment]:
    """Return this rank's fragments by ``id`` of the parameter. Parameters that only other ranks update are absent."""
    found = {}
    for group, (parameters, flat, partition) in enumerate(_groups(optimizer)):
        for parameter in parameters:
            part = _overlap(parameter, flat, partition)
            if part is not None:
                found[id(parameter)] = Fragment(group, *part)
    return found


def misplaced(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """Return the name of a parameter whose gradient and values are at different places of the partition, or None."""
    values, gradients = fragments(optimizer), dict(_gradients(optimizer))
    held = {id(p) for of_group, _, _ in _groups(optimizer) for p in of_group}
    return next((n for n, p in parameters.items() if id(p) in held and values.get(id(p)) != gradients.get(id(p))), None)


def _groups(optimizer: Any) -> Iterator[tuple[list[torch.nn.Parameter], torch.Tensor, torch.Tensor]]:
    """Yield each group's parameters, their flat buffer, and the part of the buffer that this rank updates."""
    if isinstance(optimizer, BF16_Optimizer):
        groups, flats, partitions = optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.bf16_partitioned_groups
    else:
        groups, flats = optimizer.bit16_groups, optimizer.bit16_groups_flat
        partitions = optimizer.parallel_partitioned_bit16_groups
    for parameters, flat, parts, ranks in zip(groups, flats, partitions, optimizer.real_dp_process_group, strict=True):
        yield parameters, flat, parts[dist.get_rank(ranks)]


def _overlap(tensor: torch.Tensor, flat: torch.Tensor, partition: torch.Tensor) -> tuple[int, int, int] | None:
    """Return start in the partition, start in the tensor, and length of a tensor's part inside a partition, or None."""
    at, start = ((t.data_ptr() - flat.data_ptr()) // flat.element_size() for t in (tensor, partition))
    begin, end = max(at, start), min(at + tensor.numel(), start + partition.numel())
    return (begin - start, begin - at, end - begin) if begin < end else None


def _gradients(optimizer: Any) -> Iterator[tuple[int, Fragment]]:
    """Yield ``id`` and place of each parameter's gradient, by the optimizer's own map."""
    for group, (parameters, _, partition) in enumerate(_groups(optimizer)):
        if isinstance(optimizer, BF16_Optimizer):
            flat = optimizer.fp32_groups_gradients_flat[group]
            part = optimizer.fp32_groups_gradient_flat_partition[group]
            for parameter, gradient in zip(parameters, optimizer.fp32_groups_gradients[group], strict=True):
                found = _overlap(gradient, flat, part)
                if found is not None:
                    yield id(parameter), Fragment(group, *found)
            continue
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        starts, begins = (
            table[group][rank] for table in (optimizer.grad_partition_insertion_offset, optimizer.grad_start_offset)
        )
        for parameter in parameters:
            number = optimizer.get_param_id(parameter)
            if number in starts and parameter.numel():
                start, begin = starts[number], begins[number]
                length = min(parameter.numel() - begin, partition.numel() - start)
                yield id(parameter), Fragment(group, start, begin, length)
