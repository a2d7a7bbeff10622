"""Processes below another one, on Linux."""

import time
from collections.abc import Iterable
from pathlib import Path


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_ended(pids: Iterable[int], seconds: float = 120.0) -> None:
    """Wait for processes that the operating system ends together with their parent."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    while left := [pid for pid in left if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
