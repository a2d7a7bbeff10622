"""A function in a forked process, so that each plan has a GPU context and an allocator of its own.

A fork costs milliseconds; a fresh interpreter that imports torch and transformers costs seconds for
each of some forty plans. The parent must not use the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class ChildError(Exception):
    """The function failed, or its process ended or took too long."""


def in_child(function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """Return what a function returns in a forked process.

    Raises ChildError with the last line of a traceback, the exit code, or the time limit (seconds).
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    with warnings.catch_warnings():
        # torch's threads are idle and hold no lock
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise ChildError(f"longer than {timeout:.0f} s")
        kind, value = receiver.recv()
    except EOFError:
        process.join()
        raise ChildError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if kind == "error":
        raise ChildError(value)
    return value


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(("result", function(*arguments)))
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1]
        sender.send(("error", " ".join(last.split())[:300]))
    os._exit(0)  # without the destructors of a process group
