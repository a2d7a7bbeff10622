"""Options of the command ``run``."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from executor.checkpoint.options import CheckpointOptions
from executor.cli.options import Json, Traceback
from executor.config.bounds import Count, Natural, Seconds
from executor.config.data_options import DataOptions
from executor.config.training_options import WATCHING, TrainingOptions
from executor.multinode.nodes import NodeSettings
from executor.processes.reporter import FAILURES, Supervision
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option

DRY_STEPS: Final = 2  # the second one has optimizer states, as every later one
# titles of the options in the help
MACHINES: Final = "launch, and several machines"


class Rendezvous(NamedTuple):
    """Address of node 0, and the first of its three open ports."""

    host: str
    port: int


def read_rendezvous(text: str) -> Rendezvous:
    """Read HOST:PORT.

    >>> read_rendezvous("[fd00::1]:29500")
    Rendezvous(host='fd00::1', port=29500)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65533:
        raise InputError(f"{text!r} (must be HOST:PORT, a port from 1 to 65533)")
    return Rendezvous(host.strip("[]"), int(port))


def read_hang_timeout(text: str) -> float:
    """Read seconds: 0, or enough for a step of a tiny model."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value == 0 or 1 <= value < float("inf")):
        raise InputError(f"{text!r} (must be a number from 1, or 0 for never)")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of a run on several machines."""

    nodes: Annotated[
        Count | None,
        Option(metavar="N", group=MACHINES, help="machines that take part (default: this one)"),
    ] = None
    node_rank: Annotated[
        Natural | None,
        Option(
            metavar="R",
            group=MACHINES,
            help="number of this machine, from 0 (default: SLURM_NODEID)",
        ),
    ] = None
    rendezvous: Annotated[
        Rendezvous | None,
        Option(
            metavar="HOST:PORT",
            group=MACHINES,
            read=read_rendezvous,
            help="where they meet: an address of node 0, and the first of three open ports of it",
        ),
    ] = None
    elastic: Annotated[
        bool,
        Option(
            group=MACHINES, help="plan again for the remaining nodes when one does not come back"
        ),
    ] = False
    node_timeout: Annotated[
        Seconds,
        Option(
            metavar="SECONDS",
            group=MACHINES,
            help="longest wait for a node, at the start and after a failure (default: {default})",
        ),
    ] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of ``run``, by subject."""

    plan: Annotated[Path, Option("PLAN", help="a plan.json")]
    data: DataOptions
    eval_data: Annotated[
        list[str] | None,
        Option(
            metavar="PATH|synthetic",
            group=WATCHING,
            help="as --data: report loss and perplexity on it",
        ),
    ] = None
    training: TrainingOptions
    tensorboard: Annotated[
        bool, Option(group=WATCHING, help="also write the metrics for TensorBoard")
    ] = False
    checkpoints: CheckpointOptions
    verify: Annotated[
        bool,
        Option(
            common=True,
            help="instead of training, compare loss and gradients with a single process",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Option(
            common=True,
            help="build everything, run two steps, compare memory and traffic, write nothing",
        ),
    ] = False
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="DIR",
            common=True,
            help="for run.json (default: runs/<date-time>)",
        ),
    ] = None
    launcher: Annotated[
        Literal["torchrun", "fork"],
        Option(
            group=MACHINES,
            help="how ranks start (default: {default}; fork: on a CPU only, quicker, same result)",
        ),
    ] = "torchrun"
    supervision: Supervision
    hang_timeout: Annotated[
        float,
        Option(
            metavar="SECONDS",
            group=FAILURES,
            read=read_hang_timeout,
            help="end a run when a rank makes no progress for this long (default: {default}; 0: "
            "never)",
        ),
    ] = 600.0
    machines: NodeOptions
    json: Json = False
    traceback: Traceback = False

    @property
    def steps(self) -> int:
        """Number of steps to run."""
        return DRY_STEPS if self.dry_run else self.training.steps

    @property
    def saving(self) -> CheckpointOptions:
        """Checkpoint options; a dry run writes none and resumes from none."""
        if self.dry_run:
            return CheckpointOptions(init_from=self.checkpoints.init_from)
        return self.checkpoints

    def evaluation_data(self) -> DataOptions | None:
        """Return the data that a run is evaluated on, if any."""
        if self.eval_data:
            return replace(self.data, sources=tuple(self.eval_data))
        if self.training.eval_every is not None:
            raise InputError(f"--eval-every {self.training.eval_every}: needs --eval-data")
        return None

    def with_resume(self, resume: str) -> RunOptions:
        """Return the options of a run that resumes from other checkpoints."""
        return replace(self, checkpoints=replace(self.checkpoints, resume=resume))

    def node_settings(self) -> NodeSettings | None:
        """Return the rank of this node and the rendezvous; None for a run on one machine."""
        one = self.machines
        if one.nodes is None or one.nodes == 1:
            for name in ("node_rank", "rendezvous", "elastic"):
                if getattr(one, name):
                    raise InputError(f"--{name.replace('_', '-')} needs --nodes (2 or more)")
            return None
        if one.rendezvous is None:
            raise InputError(f"--nodes {one.nodes} needs --rendezvous HOST:PORT")
        if self.launcher == "fork":
            raise InputError(f"--nodes {one.nodes} needs --launcher torchrun")
        if self.dry_run or self.verify:
            raise InputError("--dry-run and --verify run on one machine: leave out --nodes")
        rank = one.node_rank
        if rank is None:
            text = os.environ.get("SLURM_NODEID", "")
            if not text.isdecimal():
                raise InputError("--node-rank is missing (or SLURM_NODEID in the environment)")
            rank = int(text)
        if rank >= one.nodes:
            raise InputError(f"--node-rank = {rank} (must be 0 to {one.nodes - 1})")
        return NodeSettings(one.nodes, rank, *one.rendezvous, one.elastic, one.node_timeout)

    def recorded(self) -> dict[str, Any]:
        """Return the options that shape the result, as JSON values."""
        init_from = self.checkpoints.init_from
        return {
            **self.data.to_dict(),
            "eval_data": self.eval_data,
            **asdict(self.training),
            "steps": self.steps,
            "tensorboard": self.tensorboard,
            **asdict(self.checkpoints),
            "init_from": None if init_from is None else str(init_from),
            "dry_run": self.dry_run,
            **asdict(self.supervision),
            "hang_timeout": self.hang_timeout,
            **asdict(self.machines),
        }
