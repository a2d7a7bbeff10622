"""The options about checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from executor.checkpoint.options import AUTO, CheckpointOptions
from executor.cli.values import count


def add_saving(group: argparse._ArgumentGroup) -> None:
    """Add the options to the command line."""
    group.add_argument(
        "--checkpoint-every",
        type=count,
        metavar="N",
        help="save every N steps and at the end (default: at the end of a resumed run, and where "
        "a run is told to stop)",
    )
    group.add_argument(
        "--keep",
        type=count,
        default=2,
        metavar="K",
        help="keep the K newest checkpoints (default: %(default)s)",
    )
    group.add_argument(
        "--keep-every", type=count, metavar="N", help="keep those of every N-th step for good"
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="DIR|auto",
        help="go on from the newest whole checkpoint of the --output folder (auto), of another "
        "run, or from a certain one; the plan may be another one",
    )
    group.add_argument(
        "--init-from",
        type=Path,
        metavar="FOLDER",
        help="start with the weights of a Hugging Face folder (safetensors)",
    )
    group.add_argument(
        "--allow-other-data", action="store_true", help="resume although the data have changed"
    )


def saving(options: argparse.Namespace) -> CheckpointOptions:
    """Return what is asked for about checkpoints; a dry run keeps nothing and begins anew."""
    if options.dry_run:
        return CheckpointOptions(init_from=options.init_from)
    return CheckpointOptions(
        every=options.checkpoint_every,
        keep=options.keep,
        keep_every=options.keep_every,
        resume=options.resume,
        init_from=options.init_from,
        allow_other_data=options.allow_other_data,
    )
