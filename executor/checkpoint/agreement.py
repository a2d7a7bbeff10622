"""Actions that all ranks take together, so that an error of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from executor.parallel.mesh import gather_json
from hardware_profiles.errors import InputError, RunError, ShardplanError

CPU: Final = torch.device("cpu")


def on_all_ranks(
    action: Callable[[], Any], device: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Run an action on every rank; return all ranks' results (JSON values).

    Raises the error of the first rank that has one, on every rank.
    """
    try:
        own: dict[str, Any] = {"result": action()}
    except ShardplanError as error:
        own = {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        own = {"error": f"{type(error).__name__}: {error}", "exit_code": RunError.exit_code}
    answers = gather_json(own, device, group)
    for rank, answer in enumerate(answers):
        if "error" in answer:
            kind = InputError if answer["exit_code"] == InputError.exit_code else RunError
            raise kind(f"rank {rank}: {answer['error']}" if rank else answer["error"])
    return [answer["result"] for answer in answers]


def on_rank_0(
    action: Callable[[], Any], device: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> Any:
    """Run an action on rank 0; return its result, or raise its error, on every rank."""
    return on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, device, group)[0]
