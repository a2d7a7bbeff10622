"""What torch's updates cost a core of the host: ``python -m benchmarks.step_time.host_updates``.

Clocks the processor seconds of one thread, which other programs hardly disturb: of AdamW's kernel
(``fused=True``), of AdamW operator by operator (torch's default on CPU tensors), and of the norm of
a gradient, each of one large tensor in fp32 and in bf16 (the fastest of several).

Prints, for each element, the nanoseconds of the program and of the system's kernel (which hands out
new memory), the GB/s, and by how many accesses a byte of new memory is as long as an access of
AdamW's kernel: ``NEW_MEMORY_ACCESSES`` of cost_models/step_time/optimizer_update.py. A norm's GB/s
are ``CORE_BANDWIDTH`` of cost_models/communication/host_link.py if it runs on one core whatever
the number of threads, which is printed, too.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Final

ELEMENTS: Final = 2**25
ROUNDS: Final = 4
ACCESSES: Final = {"kernel": 7.0, "operators": 20.0, "norm": 1.0}  # of an element


def processor_seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the fewest seconds of one call in the program and in the system's kernel."""
    work()
    found = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        found.append((after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime))
    return min(found, key=sum)


def threads_at_work(work: Callable[[], Any]) -> float:
    """Return processor seconds over those of the thread that calls, with two threads."""
    import torch

    torch.set_num_threads(2)
    work()
    everybody, own = time.process_time(), time.thread_time()
    for _ in range(ROUNDS):
        work()
    ratio = (time.process_time() - everybody) / (time.thread_time() - own)
    torch.set_num_threads(1)
    return ratio


def update_work(precision: str, elements: int) -> dict[str, Callable[[], Any]]:
    """Return what is clocked: both forms of AdamW and the norm of the gradient."""
    import torch

    weight = torch.nn.Parameter(torch.rand(elements).to(getattr(torch, precision)))
    weight.grad = torch.rand_like(weight)
    gradient = weight.grad
    return {
        "kernel": torch.optim.AdamW([weight], fused=True).step,
        "operators": torch.optim.AdamW([weight]).step,
        "norm": lambda: torch.linalg.vector_norm(gradient),
    }


def measure(elements: int = ELEMENTS) -> dict[tuple[str, str], tuple[float, float]]:
    """Return nanoseconds an element in the program and the kernel, by precision and work."""
    import torch

    torch.set_num_threads(1)
    found = {}
    for precision in ("float32", "bfloat16"):
        for name, work in update_work(precision, elements).items():
            program, system = processor_seconds(work)
            found[precision, name] = 1e9 * program / elements, 1e9 * system / elements
    return found


def main() -> None:
    """Print the table."""
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else ELEMENTS
    found = measure(elements)
    print(f"{'precision':10}{'work':11}{'program, ns':>12}{'system, ns':>12}{'GB/s':>8}")
    for (precision, name), seconds in found.items():
        moved = ACCESSES[name] * (4.0 if precision == "float32" else 2.0)
        rate = moved / max(sum(seconds), 1e-9)
        print(f"{precision:10}{name:11}{seconds[0]:12.2f}{seconds[1]:12.2f}{rate:8.1f}")
    for precision in ("float32", "bfloat16"):
        access = sum(found[precision, "kernel"]) / ACCESSES["kernel"]
        new = (sum(found[precision, "operators"]) / access - ACCESSES["operators"]) / 2.0
        print(f"{precision}: new memory is as long as {new:.1f} accesses")
    for name, work in update_work("float32", elements).items():
        print(f"{name}: {threads_at_work(work):.2f} of 2 threads at work")


if __name__ == "__main__":
    main()
