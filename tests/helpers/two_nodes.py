"""Two nodes on one machine: each has its own network, clock, host name and shared memory, which Linux calls namespaces.

A pair of virtual network interfaces joins them, and nothing else: no address of this machine can be reached from
either. The second node's clock is a day ahead. A process holds each node's namespaces. It ends by itself if nobody ends
it, and with the last process of a node the kernel removes them and the link.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tf_adapters.testing.ranks import HANG_S

CLOCK_AHEAD_S = 86_400
PORT = 29_400  # nothing else listens on a new node
_LINK = "link0"
_KINDS = {"net": "net", "time": "time", "ipc": "ipc", "uts": "uts", "mount": "mnt"}  # as commands and as /proc call it
_HELD_S = 600


def why_not() -> str:
    """Why there can be no two nodes here, in a few words; empty where there can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make namespaces"
    if missing := [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (Debian's iproute2, util-linux)"
    try:
        with TwoNodes():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"this machine makes no namespaces: {getattr(error, 'stderr', None) or error}"


@dataclass(frozen=True)
class Node:
    """One node. ``holder`` is the process that its namespaces are those of."""

    number: int
    holder: int

    @property
    def address(self) -> str:
        return f"192.0.2.{1 + self.number}"  # RFC 5737: addresses that belong to nobody

    def command(self, *command: object, folder: Path = Path("/")) -> list[str]:
        """What runs a command on this node, in ``folder``."""
        kinds = [f"--{kind}" for kind in _KINDS]
        return ["nsenter", "--target", str(self.holder), *kinds, f"--wdns={folder}", *map(str, command)]

    def enter(self) -> None:
        """Move this process to the node. It must have one thread. Raises OSError."""
        files = [os.open(f"/proc/{self.holder}/ns/{kind}", os.O_RDONLY) for kind in _KINDS.values()]
        for file in files:
            if ctypes.CDLL(None, use_errno=True).setns(file, 0):
                raise OSError(ctypes.get_errno(), "a process cannot enter its node")
            os.close(file)

    def environment(self) -> dict[str, str]:
        """Where ranks meet, and the interface that gloo is to take."""
        return {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": _LINK}

    def processes(self) -> list[int]:
        """What runs on the node, its holder left out."""
        found = []
        with suppress(OSError):
            own = os.readlink(f"/proc/{self.holder}/ns/net")
            for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                with suppress(OSError):
                    if os.readlink(f"/proc/{pid}/ns/net") == own and pid != self.holder:
                        found.append(pid)
        return found

    def kill(self) -> None:
        """The node is switched off: everything that runs on it ends at once."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def disconnect(self) -> None:
        """Nothing that is sent arrives any more, and no connection is closed."""
        _run(self.command("ip", "link", "set", _LINK, "down"))


class TwoNodes:
    """A context manager that makes two nodes. At its end whatever runs on them is killed. See ``why_not`` first."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> tuple[Node, Node]:
        try:
            first, second = (self._hold(number) for number in range(2))
            link = ("ip", "link", "add", _LINK, "netns", first.holder, "type", "veth")
            _run([*link, "peer", "name", _LINK, "netns", second.holder])
            for node in (first, second):
                _run(node.command("ip", "address", "add", f"{node.address}/24", "dev", _LINK))
                _run(node.command("ip", "link", "set", _LINK, "up"))
        except BaseException:
            self.close()
            raise
        return first, second

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the nodes and whatever runs on them."""
        for number, holder in enumerate(self._holders):
            Node(number, holder.pid).kill()
            holder.kill()
            holder.communicate()
        self._holders.clear()

    def _hold(self, number: int) -> Node:
        ahead = number * CLOCK_AHEAD_S
        clocks = (f"--monotonic={ahead}", f"--boottime={ahead}")
        prepare = f"mount -t tmpfs none /dev/shm && hostname node{number} && ip link set lo up && echo ready"
        holder = subprocess.Popen(
            ["unshare", *(f"--{kind}" for kind in _KINDS), *clocks, "sh", "-c", f"{prepare} && exec sleep {_HELD_S}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError(holder.stderr.read().strip())
        return Node(number, holder.pid)


def _run(command: list[object] | list[str]) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, timeout=HANG_S)


def node_folder(folder: Path, number: int) -> Path:
    """A node's own working directory."""
    own = folder / f"node{number}"
    own.mkdir(parents=True, exist_ok=True)
    return own
