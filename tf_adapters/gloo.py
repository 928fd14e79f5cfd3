"""A gloo group of our own for the ranks of one of the host's process groups.

``torch.distributed.new_group`` cannot make it. If all ranks of the job need not take part, torch names the group by its
ranks and by how many groups this process is in. Ranks that are in other numbers of groups, such as those with a tied
weight, then wait for each other under different names. And a second group of the same ranks gets the name of the first
one, after that was destroyed, and ranks may read each other's old addresses. Here the ranks count their groups in the
job's store.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tf_adapters.errors import UnsupportedError

_DEFAULT_TIMEOUT = timedelta(minutes=30)


def gloo_group(group: Any = None) -> Any:
    """Return a ``ProcessGroupGloo`` of the ranks of ``group`` (all ranks by default), in the same order.

    Call it on all ranks of ``group`` at the same point; other ranks need not take part. ``torch.distributed`` does not
    know the group: use its own methods. It is freed with its last reference. Its timeout is that of ``group``, so ranks
    wait as long for us as for the host. Raises UnsupportedError if the ranks cannot reach each other.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    store = _get_default_store()
    name = "timely_freeze/" + hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    try:
        number = (store.add(name, 1) - 1) // len(ranks)  # of earlier groups: each rank has counted once for each
        own = PrefixStore(f"{name}/{number}", store)
        return ProcessGroupGloo(own, dist.get_rank(group), len(ranks), timeout=_timeout(group))
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            "timely_freeze cannot run here: the ranks cannot reach each other over gloo, which our messages need; "
            f"GLOO_SOCKET_IFNAME names the network interface ({' '.join(str(error).split())})"
        ) from error


def _timeout(group: Any) -> timedelta:
    """Return the timeout of ``group``, or torch's default if it has none."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [limit for of in options if (limit := getattr(of, "_timeout", None)) is not None]
    return max(limits, default=_DEFAULT_TIMEOUT)
