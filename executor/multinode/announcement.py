"""A node tells the others what it is, and tries to reach them, before an attempt begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.multinode.nodes import OpenPort, facts, own_address, unreachable
from executor.multinode.rendezvous import Meeting

# options that may differ between nodes, each with a value
_OWN = ("--node-rank", "--output", "--rendezvous", "--data", "--tokenizer")


@dataclass(frozen=True, slots=True)
class About:
    """What a node says about itself."""

    plan: str  # SHA-256
    arguments: Sequence[str]  # of the command line
    gpus: Sequence[str]  # names
    problem: str | None  # why this machine cannot take part


def wait_for(meeting: Meeting, key: str) -> Any:
    """Wait for a word of node 0, or for the end of the run."""
    while (value := meeting.wait(key, 0.3)) is None:
        if meeting.hear("end") is not None:
            return {"end": True}
    return value


class Announced:
    """Tells the others about this node, tries to reach them and reports to node 0."""

    def __init__(self, meeting: Meeting, attempt: int, about: About) -> None:
        nodes = meeting.nodes
        self.meeting, self.attempt = meeting, attempt
        self.address = own_address(nodes.host, nodes.port)
        self.said = facts(
            plan=about.plan,
            options=_hash(about.arguments, nodes.count),
            gpus=about.gpus,
            address=self.address,
            problem=about.problem,
        )

    def __enter__(self) -> None:
        meeting, rank = self.meeting, self.meeting.nodes.rank
        self.port = OpenPort(self.address).__enter__()
        said = {**self.said, "port": self.port.number}
        meeting.say(f"{self.attempt}/node/{rank}", said)
        if not meeting.leads:
            asked = wait_for(meeting, f"{self.attempt}/reach")
            if "end" not in asked:
                meeting.say(f"{self.attempt}/reached/{rank}", self._missing(asked))

    def __exit__(self, *_: object) -> None:
        self.port.__exit__()

    def _missing(self, asked: Mapping[str, Any]) -> list[str]:
        """Return what this node cannot reach or see."""
        own = str(self.meeting.nodes.rank)
        others = {int(rank): node for rank, node in asked["nodes"].items() if rank != own}
        missing = [f"cannot reach {words}" for words in unreachable(others)]
        if asked["witness"] is not None and not Path(asked["witness"]).exists():
            missing.append(
                f"does not see {asked['witness']}: the folder of a run has to be on a file system "
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
