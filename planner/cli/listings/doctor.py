"""``shardplan doctor``: what is installed on this machine, and what a command would still need."""

from __future__ import annotations

import importlib.metadata
import json as json_format
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hardware_profiles.cluster.local_machine import visible_gpus
from hardware_profiles.cluster.measurement import (
    available_cores,
    cache_folder,
    machine_memory_bytes,
)
from hardware_profiles.errors import ShardplanError
from hardware_profiles.progress import report
from hardware_profiles.terminal import show
from planner.cli.options import Json

# distributions and the extra that installs them ("": shardplan itself), and what needs them
DISTRIBUTIONS: Final = {
    **dict.fromkeys(("numpy", "scipy", "networkx", "pandas"), ("", "every command")),
    **dict.fromkeys(("msgspec", "click", "pyyaml", "tomli-w"), ("", "every command")),
    "huggingface-hub": ("", "models by their Hugging Face name"),
    "packaging": ("", "doctor"),
    "torch": ("run", "run, calibrate, module:…, here without a GPU"),
    "transformers": ("run", "run, module:…"),
    "safetensors": ("run", "run, export of weights"),
    "rich": ("run", "the display of run"),
    "pyarrow": ("data", "Parquet files of run --data and tokenize"),
    **dict.fromkeys(("jinja2", "starlette", "uvicorn"), ("page", "serve")),
    "tensorboard": ("tensorboard", "run --tensorboard"),
}
PROGRAMS: Final = {
    "sbatch": "launch --on slurm",
    "kubectl": "launch --on kubernetes",
    "sky": "launch --on skypilot",
    "ray": "launch --on ray",
    "ssh": "launch --on ssh",
}
# printed as one line of JSON by a process that may import torch
TORCH_FACTS: Final = """
import json, sys, torch
gpu = torch.cuda.is_available()
sys.stdout.write(json.dumps({
    "cuda": torch.version.cuda, "rocm": torch.version.hip, "devices": torch.cuda.device_count(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
}))
"""
TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution of this Python: its version (None: not installed), and what needs it."""

    name: str
    version: str | None
    requirement: str  # such as ">=2.0"; "" where any version will do
    extra: str
    needed_by: str

    @property
    def problem(self) -> str:
        """What is wrong with it: missing, a version that is not supported, or nothing."""
        if self.version is None:
            return "missing"
        allowed = SpecifierSet(self.requirement)
        return "" if allowed.contains(self.version, prereleases=True) else f"needs {allowed}"


def distributions() -> list[Installed]:
    """Return the distributions that some command needs, as this Python has them."""
    required: dict[str, str] = {}
    for line in importlib.metadata.requires("shardplan") or ():
        found = Requirement(line)
        required.setdefault(found.name.lower(), str(found.specifier))
    return [
        Installed(name, _version(name), required.get(name, ""), extra, needed_by)
        for name, (extra, needed_by) in DISTRIBUTIONS.items()
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts() -> dict[str, Any]:
    """Return CUDA, NCCL and devices as torch sees them; ``problem`` where it does not import."""
    report("importing torch")
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_FACTS],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"torch does not answer within {TIMEOUT_SECONDS:.0f} s"}
    except OSError as error:
        return {"problem": f"{sys.executable}: {error.strerror}"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"problem": f"torch cannot be imported: {last}"}
    return dict(json_format.loads(done.stdout.splitlines()[-1]))


def machine() -> dict[str, Any]:
    """Return everything that doctor reports, as plain JSON values."""
    from planner.reports.pdf import browser

    gpus, problem = [], None
    try:
        gpus = [asdict(gpu) for gpu in visible_gpus()]
    except ShardplanError as error:
        problem = str(error)
    found = distributions()
    torch = next(one for one in found if one.name == "torch")
    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    extras = {one.extra for one in found if one.problem}
    return {
        "schema_version": 1,
        "shardplan": importlib.metadata.version("shardplan"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": available_cores(),
        "memory_bytes": machine_memory_bytes(),
        "gpus": gpus,
        "gpu_problem": problem,
        "torch": torch_facts() if torch.version is not None else None,
        "packages": [{**asdict(one), "problem": one.problem or None} for one in found],
        "programs": {name: shutil.which(name) for name in PROGRAMS} | {"chromium": browser()},
        "cache": {
            "folder": str(folder),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
        },
        "install": [
            f"pip install 'shardplan[{extra}]'" if extra else "pip install --upgrade shardplan"
            for extra in sorted(extras)
        ],
    }


def machine_text(found: Mapping[str, Any]) -> str:
    """Return the report as text."""
    from cost_models.units import format_bytes
    from planner.text.paragraphs import hanging, plain

    memory = format_bytes(found["memory_bytes"])
    lines = [
        *plain(f"shardplan {found['shardplan']} · Python {found['python']} · {found['system']}"),
        f"{found['cores']} cores · {memory}",
        "",
        "GPUs",
    ]
    lines += [
        f"  {gpu['name']}  {format_bytes(gpu['memory_bytes'] or 0.0)}  driver {gpu['driver']}"
        for gpu in found["gpus"]
    ] or plain(found["gpu_problem"] or "none (nvidia-smi lists none); CPU processes train", "  ")
    if (torch := found["torch"]) is not None:
        lines += plain(_torch_words(torch), "  ")
    lines += ["", "Packages"]
    for one in found["packages"]:
        state = one["problem"] or one["version"]
        lines += hanging(f"  {one['name']:<16} {state:<18} ", one["needed_by"])
    lines += ["", "Programs"]
    uses = {**PROGRAMS, "chromium": "report --pdf"}
    for name, path in found["programs"].items():
        lines.append(f"  {name:<16} {'found' if path else 'not on the PATH':<18} {uses[name]}")
    cache = found["cache"]
    size = format_bytes(float(cache["bytes"]))
    lines += ["", *hanging("Cache  ", f"{cache['folder']}: {cache['files']} files, {size}")]
    lines += [f"Next   {command}" for command in found["install"]]
    return "\n".join(lines)


def _torch_words(torch: Mapping[str, Any]) -> str:
    if problem := torch.get("problem"):
        return str(problem)
    built = [f"CUDA {torch['cuda']}"] * bool(torch["cuda"])
    built += [f"ROCm {torch['rocm']}"] * bool(torch["rocm"])
    words = [f"torch for {' and '.join(built) or 'CPUs'}", f"{torch['devices']} devices"]
    words.append(f"NCCL {torch['nccl']}" if torch["nccl"] else "no NCCL")
    return ", ".join([*words, *["gloo"] * bool(torch["gloo"])])


def doctor(json: Json = False) -> None:
    """Show versions, GPUs, NCCL, the cache, and what to install for which command."""
    from planner.text.answer import json_text

    found = machine()
    show(json_text(found) if json else machine_text(found))
