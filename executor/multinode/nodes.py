"""Nodes of a run: their properties, and the differences between them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import platform
import shutil
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cost_models.units import format_bytes

# properties that must be equal on every node, and their names
SAME: Final = {
    "shardplan": "shardplan",
    "torch": "torch",
    "transformers": "transformers",
    "python": "Python",
    "plan": "the plan (SHA-256)",
    "options": "the options",
    "gpu": "the GPUs",
}
REACH_SECONDS: Final = 5.0
_ADDRESS_OF_INTERFACE: Final = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Rank of this node, and the rendezvous of all nodes."""

    count: int
    rank: int
    host: str  # of node 0
    port: int
    elastic: bool
    timeout: float  # seconds to wait for a node

    @property
    def place(self) -> str:
        """Address of the rendezvous."""
        return f"{self.host}:{self.port}"


def node_properties(
    *, plan: str, options: str, gpus: Sequence[str], address: str, problem: str | None
) -> dict[str, Any]:
    """Return the properties of this node."""
    names = Counter(gpus)
    return {
        "host": platform.node(),
        "address": address,
        "shardplan": importlib.metadata.version("shardplan"),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "plan": plan[:12],
        "options": options[:12],
        "gpu": ", ".join(f"{count} x {name}" for name, count in names.items()) or "none",
        "problem": problem,
    }


def differences(nodes: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the differences between nodes, one line each.

    >>> one = dict.fromkeys(SAME, "1") | {"host": "a", "problem": None}
    >>> other = one | {"host": "b", "torch": "2"}
    >>> differences({0: one, 1: one, 2: other})
    ['torch: node 2 (b) has 2, the others 1']
    """
    found = []
    for key, name in SAME.items():
        values = Counter(str(node[key]) for node in nodes.values())
        usual = max(values, key=lambda value: (values[value], value == str(nodes[0][key])))
        for rank, node in nodes.items():
            if str(node[key]) != usual:
                found.append(
                    f"{name}: node {rank} ({node['host']}) has {node[key]}, the others {usual}"
                )
    for rank, node in nodes.items():
        if node["problem"]:
            found.append(f"node {rank} ({node['host']}): {node['problem']}")
    return found


def disk_problem(folder: Path, needed: float) -> str | None:
    """Return the problem if a folder's disk has less free space than one checkpoint needs."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return (
        f"{folder}: a checkpoint needs about {format_bytes(needed)} of disk, "
        f"{format_bytes(free)} are free"
    )


def own_address(host: str, port: int) -> str:
    """Return the address by which the other nodes reach this one."""
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface with an address (IPv4, Linux); None if not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


class OpenPort:
    """A port for the connection tests of other nodes; closed with the context."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0)[0][0]
        self.listening = socket.create_server((address, 0), family=family)
        self.number = int(self.listening.getsockname()[1])

    def __enter__(self) -> OpenPort:
        self.accepting = threading.Thread(target=self._accept, daemon=True)
        self.accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        # close() alone leaves the port open for as long as accept() waits in the thread
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.accepting.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self.listening.accept()[0].close()


def unreachable(others: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the nodes whose open ports cannot be reached from here."""
    found = []
    for rank, node in others.items():
        place = (node["address"], node["port"])
        try:
            socket.create_connection(place, timeout=REACH_SECONDS).close()
        except OSError as error:
            found.append(f"node {rank} at {place[0]}:{place[1]} ({error.strerror or error})")
    return found
