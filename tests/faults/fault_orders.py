"""Two hundred random orders on four ranks with two stages each, with late transfers: no hang, and the host's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed_orders
import megatron_orders
import pytest
import torch
from megatron_oracle import check_same

ORDERS = 200


@pytest.mark.parametrize("name", ["pipeline 4, interleaved", "V of 8"])
def fault_two_hundred_orders_on_megatron(megatron: Any, name: str) -> None:
    case = replace(megatron_orders.CASES[name], steps=ORDERS + 1)
    ours = megatron(4).run(megatron_orders.in_random_orders, case, timeout_s=1800)
    alone = megatron(4).run(megatron_orders.in_random_orders, replace(case, section=None), timeout_s=1800)
    assert all(sum(rank["moved"]) > 0.9 * ORDERS for rank in ours)
    check_same(ours, alone)


def fault_two_hundred_orders_on_deepspeed(pools: Any) -> None:
    case = replace(deepspeed_orders.SAME_BITS["four ranks"], steps=ORDERS + 2)
    ours = pools(4).run(deepspeed_orders.in_random_orders, case, timeout_s=1800)
    alone = pools(4).run(deepspeed_orders.in_random_orders, replace(case, section=None), timeout_s=1800)
    assert all(sum(rank["moved"]) > 0.9 * ORDERS for rank in ours)
    for mine, theirs in zip(ours, alone, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert all(torch.equal(mine["parameters"][name], value) for name, value in theirs["parameters"].items())
