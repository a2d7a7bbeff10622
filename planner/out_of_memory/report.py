"""The figures of an out-of-memory error of torch, and the place in the step where it was raised.

Messages: c10/cuda/CUDACachingAllocator.cpp of torch 1.x to 2.13 ("CUDA out of memory. Tried to
allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; ...)" up to 2.1, "GPU 0 has a total capacity of
79.15 GiB of which ..." since; read in logs of users, not in the source of every release). HIP has
the same sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hardware_profiles.errors import InputError

MAX_LINE: Final = 4000  # characters that are read
UNITS: Final = {"": 1.0, "b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
# torch wrote GB for GiB once
UNITS_10: Final = {"kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30, "tb": 2.0**40}
_SIZE: Final = r"(?<![\d.])(?P<{0}>\d{{1,15}}(?:\.\d{{1,15}})?)\s*(?P<{0}_unit>[KMGT]i?B|B|bytes)"
_FIGURES: Final = {
    "requested": ("Tried to allocate {}",),
    "capacity": ("total capacity of {}", r"{} total capacity"),
    "free": ("of which {} is free", r"{} free"),
    "allocated": ("{} is allocated by PyTorch", "{} already allocated", "{} allowed"),
    "reserved": (r"{} reserved in total",),
    "unallocated": ("{} is reserved by PyTorch but unallocated",),
}
_PROCESSES: Final = r"\b(?P<which>this process|Process \d+) has {} memory in use"
_DEVICE: Final = re.compile(r"\bGPU (\d+)")
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_RANK: Final = re.compile(r"\s*\[rank\d+\]:")
_ERROR: Final = re.compile(r"(?:OutOfMemoryError|out of memory)", re.I)
# places in the step, the innermost frame that matches first: file or function, and the phase
PHASES: Final = (
    (r"loss|cross_entropy|log_softmax|nll_loss|\blogits\b|\blm_head\b", "loss"),
    (r"optim[/\\]|optimizer|_multi_tensor|_single_tensor|\bstep\b", "optimizer"),
    (r"autograd[/\\]__init__|autograd[/\\]graph|_engine_run_backward|\bbackward\b", "backward"),
    (r"clip_grad|_norm_", "gradient clipping"),
    (r"_fsdp|fully_shard|flat_param|all_gather|stage3\.py|stage_1_and_2", "gathering weights"),
    (r"\b(?:forward|_call_impl|_wrapped_call_impl)\b", "forward"),
    (r"_apply|\bto\b|\bcuda\b|load_state_dict|from_pretrained|_load_", "loading the model"),
)


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Figures of an error in bytes (None: not printed), and where it was raised."""

    requested: float
    device: int | None = None
    capacity: float | None = None
    free: float | None = None
    allocated: float | None = None  # live tensors
    unallocated: float | None = None  # reserved by torch's allocator, without live tensors
    others: float = 0.0  # of other processes on the device
    phase: str | None = None  # forward, backward, optimizer, loss, ...
    place: str | None = None  # innermost line of the model, or of torch
    code: str | None = None  # that line

    @property
    def is_fragmented(self) -> bool:
        """Whether the free blocks of torch's allocator would have sufficed together."""
        return self.unallocated is not None and self.unallocated >= self.requested


def read_report(text: str) -> OutOfMemory:
    """Read a traceback, or a log that contains one; of several errors the first.

    >>> report = read_report("CUDA out of memory. Tried to allocate 2.00 GiB.")
    >>> report.requested / 2**30
    2.0
    """
    lines = [line[:MAX_LINE] for line in text.splitlines()]
    found = next((i for i, line in enumerate(lines) if "Tried to allocate" in line), None)
    if found is None:
        wanted = "a line with 'Tried to allocate ...'"
        if _ERROR.search(text):
            wanted += " (this error of CUDA itself prints no figures)"
        raise InputError(f"no out-of-memory error of torch: expected {wanted}")
    if rank := _RANK.match(lines[found]):  # torchrun mixes the lines of all ranks
        own = [at for at, line in enumerate(lines) if line.startswith(rank[0])]
        lines, found = [lines[at][len(rank[0]) :] for at in own], own.index(found)
    message = " ".join(line.strip() for line in lines[found : found + 4])
    figures = {name: _figure(message, patterns) for name, patterns in _FIGURES.items()}
    requested = figures["requested"]
    if requested is None:
        raise InputError(f"{lines[found].strip()[:120]!r}: no size behind 'Tried to allocate'")
    unallocated = figures["unallocated"]
    if unallocated is None and figures["reserved"] and figures["allocated"]:
        unallocated = max(0.0, figures["reserved"] - figures["allocated"])
    device = _DEVICE.search(message)
    phase, place, code = _place(lines[:found])
    return OutOfMemory(
        requested=requested,
        device=None if device is None else int(device[1]),
        capacity=figures["capacity"],
        free=figures["free"],
        allocated=figures["allocated"],
        unallocated=unallocated,
        others=_others(message, (figures["allocated"] or 0.0) + (unallocated or 0.0)),
        phase=phase,
        place=place,
        code=code,
    )


def _figure(message: str, patterns: tuple[str, ...]) -> float | None:
    """Return the bytes behind the first pattern that occurs."""
    for pattern in patterns:
        found = re.search(pattern.format(_SIZE.format("size")), message, re.I)
        if found is not None:
            return _bytes(found)
    return None


def _bytes(found: re.Match[str]) -> float:
    unit = found["size_unit"].lower().replace("bytes", "b")
    return float(found["size"]) * (UNITS.get(unit) or UNITS_10[unit])


def _others(message: str, reserved: float) -> float:
    """Return the bytes of other processes; ``reserved``: those of this one's allocator.

    In a container torch does not recognise its own process among those of the device, and lists it
    by number: the smallest one that can hold what is reserved (pytorch/pytorch pull request 99699).
    """
    pattern = re.compile(_PROCESSES.format(_SIZE.format("size")), re.I)
    listed = [(found["which"].lower(), _bytes(found)) for found in pattern.finditer(message)]
    others = sorted(size for which, size in listed if which != "this process")
    if len(others) == len(listed):
        own = next((size for size in others if size >= reserved > 0.0), None)
        if own is not None:
            others.remove(own)
    return sum(others)


def _place(lines: list[str]) -> tuple[str | None, str | None, str | None]:
    """Return the phase, the innermost frame outside of torch's internals, and its code.

    Frames of the last traceback before the message; innermost ones count first for the phase, but a
    forward pass inside of a backward pass (recomputation) is backward.
    """
    frames: list[tuple[str, str, str]] = []
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            frames = []
        elif found := _FRAME.search(line):
            after = lines[number + 1].strip() if number + 1 < len(lines) else ""
            code = "" if _FRAME.search(after) else after
            frames.append((found["file"], f"{found['name']} ({found['line']})", code))
    if not frames:
        return None, None, None
    phase = _phase(frames)
    own = [frame for frame in frames if not _is_inside_torch(frame[0])]
    file, name, code = (own or frames)[-1]
    short = "/".join(re.split(r"[/\\]", file)[-3:])
    return phase, f"{short}: {name}", code or None


def _phase(frames: list[tuple[str, str, str]]) -> str | None:
    """Return the part of the step: that of the innermost frame that names one."""
    texts = [f"{file} {name} {code}" for file, name, code in frames]
    for text in reversed(texts):
        for pattern, phase in PHASES:
            if re.search(pattern, text):
                around = " ".join(texts)
                if phase in ("forward", "loss") and "_engine_run_backward" in around:
                    return "backward (recomputation)"
                return phase
    return None


def _is_inside_torch(file: str) -> bool:
    return bool(
        re.search(r"site-packages[/\\]torch[/\\]|[/\\]torch[/\\](?:nn|_tensor|optim)", file)
    )
