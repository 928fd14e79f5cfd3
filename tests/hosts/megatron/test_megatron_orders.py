"""Any order of a batch on Megatron-Core, with one or two chunks on a rank: no hang, and the bits of the host alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_oracle import check_same
from megatron_orders import CASES, in_random_orders

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", CASES)
def test_any_order_is_the_host_to_the_bit(megatron, name):
    case = CASES[name]
    ours = megatron(4).run(in_random_orders, case)
    assert all(sum(rank["moved"]) > case.steps / 2 for rank in ours)
    check_same(ours, megatron(4).run(in_random_orders, replace(case, section=None)))
