"""Announcement of a node before an attempt: its properties, and a connection test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.multinode.nodes import OpenPort, node_properties, own_address, unreachable
from executor.multinode.rendezvous import NodeRendezvous

# options with a value that may differ between nodes
_OWN = ("--node-rank", "--output", "--rendezvous", "--data", "--tokenizer")


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """Description of a node."""

    plan: str  # SHA-256
    arguments: Sequence[str]  # of the command line
    gpus: Sequence[str]  # names
    problem: str | None  # why this machine cannot take part


def wait_for(rendezvous: NodeRendezvous, key: str) -> Any:
    """Wait for a message of node 0, or for the end of the run."""
    while (value := rendezvous.wait(key, 0.3)) is None:
        if rendezvous.read("end") is not None:
            return {"end": True}
    return value


class NodeAnnouncement:
    """Announces this node, tests connections to the others and reports to node 0."""

    def __init__(self, rendezvous: NodeRendezvous, attempt: int, about: NodeDescription) -> None:
        nodes = rendezvous.nodes
        self.rendezvous, self.attempt = rendezvous, attempt
        self.address = own_address(nodes.host, nodes.port)
        self.properties = node_properties(
            plan=about.plan,
            options=_hash(about.arguments, nodes.count),
            gpus=about.gpus,
            address=self.address,
            problem=about.problem,
        )

    def __enter__(self) -> None:
        rendezvous, rank = self.rendezvous, self.rendezvous.nodes.rank
        self.port = OpenPort(self.address).__enter__()
        properties = {**self.properties, "port": self.port.number}
        rendezvous.publish(f"{self.attempt}/node/{rank}", properties)
        if not rendezvous.is_leader:
            request = wait_for(rendezvous, f"{self.attempt}/reach")
            if "end" not in request:
                rendezvous.publish(f"{self.attempt}/reached/{rank}", self._missing(request))

    def __exit__(self, *_: object) -> None:
        self.port.__exit__()

    def _missing(self, request: Mapping[str, Any]) -> list[str]:
        """Return descriptions of unreachable nodes and of a missing shared folder."""
        own = str(self.rendezvous.nodes.rank)
        others = {int(rank): node for rank, node in request["nodes"].items() if rank != own}
        missing = [f"cannot reach {words}" for words in unreachable(others)]
        if request["witness"] is not None and not Path(request["witness"]).exists():
            missing.append(
                f"does not see {request['witness']}: the run's folder has to be on a file system "
                "that all nodes share"
            )
        return missing


def _hash(arguments: Sequence[str], count: int) -> str:
    """Return a hash of the options that must be equal on every node."""
    kept, own = [], False
    for word in arguments:
        if own:
            own = False
        elif word in _OWN:
            own = True
        elif not word.startswith(tuple(f"{name}=" for name in _OWN)):
            kept.append(word)
    return hashlib.sha256(json.dumps([kept[2:], count]).encode()).hexdigest()
