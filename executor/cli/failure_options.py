"""The options about ranks that fail, hang or are told to stop."""

from __future__ import annotations

import argparse
import os

from executor.cli.values import count, natural, number
from executor.multinode.nodes import NodeSettings
from executor.processes.reporter import Supervision
from executor.processes.signals import signal_number
from hardware_profiles.errors import InputError


def add_failures(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    group.add_argument(
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="start failed ranks again so often, from the last checkpoint (default: %(default)s)",
    )
    group.add_argument(
        "--hang-timeout",
        type=hang_timeout,
        default=600.0,
        metavar="SECONDS",
        help="end a run when a rank did not get on for so long (default: %(default)g; 0: never)",
    )
    group.add_argument(
        "--preemption-signal",
        type=stop_signal,
        default="SIGUSR1",
        metavar="NAME",
        help="stop in good order at this signal, as at SIGTERM (default: %(default)s)",
    )


def add_nodes(group: argparse._ArgumentGroup) -> None:
    """Add the options about several machines to the command line."""
    group.add_argument(
        "--nodes", type=count, metavar="N", help="machines that take part (default: this one)"
    )
    group.add_argument(
        "--node-rank",
        type=natural,
        metavar="R",
        help="which of them this is, from 0 (default: SLURM_NODEID)",
    )
    group.add_argument(
        "--rendezvous",
        type=meeting_place,
        metavar="HOST:PORT",
        help="where they meet: an address of node 0, and the first of three open ports of it",
    )
    group.add_argument(
        "--elastic",
        action="store_true",
        help="plan again for the nodes that are left when one does not come back",
    )
    group.add_argument(
        "--node-timeout",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="wait so long for a node, at the start and after a failure (default: %(default)g)",
    )


def nodes(options: argparse.Namespace) -> NodeSettings | None:
    """Return which of several nodes this is; None where there is one only."""
    if options.nodes is None or options.nodes == 1:
        for name in ("node_rank", "rendezvous", "elastic"):
            if getattr(options, name):
                raise InputError(f"--{name.replace('_', '-')} needs --nodes (2 or more)")
        return None
    if options.rendezvous is None:
        raise InputError(f"--nodes {options.nodes} needs --rendezvous HOST:PORT")
    if options.launcher == "fork":
        raise InputError(f"--nodes {options.nodes} needs --launcher torchrun")
    if options.dry_run or options.verify:
        raise InputError("--dry-run and --verify run on one machine: leave out --nodes")
    rank = options.node_rank
    if rank is None:
        text = os.environ.get("SLURM_NODEID", "")
        if not text.isdecimal():
            raise InputError("--node-rank is missing (or SLURM_NODEID in the environment)")
        rank = int(text)
    if rank >= options.nodes:
        raise InputError(f"--node-rank = {rank} (must be 0 to {options.nodes - 1})")
    host, port = options.rendezvous
    return NodeSettings(options.nodes, rank, host, port, options.elastic, options.node_timeout)


def supervision(options: argparse.Namespace) -> Supervision:
    """Return what is done about ranks that fail or are asked to stop."""
    return Supervision(options.max_restarts, options.preemption_signal)


def hang_timeout(text: str) -> float:
    """Read seconds: 0, or long enough for a step of a tiny model."""
    value = number(text)
    if not (value == 0 or value >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 1, or 0 for never)")
    return value


def stop_signal(text: str) -> int:
    """Read the name of a signal."""
    try:
        return signal_number(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Read a number of seconds from 1."""
    value = number(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} (must be a number from 1)")
    return value


def meeting_place(text: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65533:
        raise argparse.ArgumentTypeError(f"{text!r} (must be HOST:PORT, a port from 1 to 65533)")
    return host.strip("[]"), int(port)
