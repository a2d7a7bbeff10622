"""The options about ranks that fail, hang or are told to stop."""

from __future__ import annotations

import argparse

from executor.signals import signal_number
from executor.supervision import Supervision
from executor.values import natural, number
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
