"""Data-parallel training of any ``nn.Module`` with ZeRO 0 to 3; layers are not split.

A factory returns the module. Called with the rows of a micro-batch, the module returns their mean
loss, or an object with this ``loss``. Blocks (``executor.trace.module_blocks``) are gathered one at
a time and may be recomputed. ``executor.trace.trace`` measures their memory and work.

In bf16, weights, gradients and optimizer states are fp32 and operators run under torch.autocast,
which keeps those that need it in fp32 (batch norms, losses). fp16 would need loss scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Optimizer, Precision
from executor.compat import replicate
from executor.dtypes import COMPUTE_DTYPE, MASTER_DTYPE, local_tensor
from executor.parallel.mesh import ProcessGrid, connect, local_device
from executor.trace.module_blocks import blocks, loss_of, recompute
from executor.trace.module_factory import Factory
from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError

PRECISIONS: Final = ("bf16", "fp32", "fp64")
OPTIMIZERS: Final[dict[str, Any]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_ITS_OWN: Final = {"data_parallel", "dp_replicate", "zero_stage", "micro_batch_size"}
_ITS_OWN_TOO: Final = {"num_microbatches", "pipeline_schedule", "context_parallel_method"}


def check_plan(plan: Plan) -> None:
    """Raise an InputError for the first option of a plan that is not data parallelism."""
    default = Plan()
    for field in fields(Plan):
        value, allowed = getattr(plan, field.name), getattr(default, field.name)
        if field.name == "recompute" and value == "full":
            continue
        if field.name not in _ITS_OWN | _ITS_OWN_TOO and value not in (allowed, False):
            raise InputError(
                f"{field.name} = {value}: an nn.Module of unknown layers is trained over data "
                f"ranks only (must be {allowed})"
            )


def check_precision(precision: str) -> None:
    """Raise an InputError for a precision that autocast alone does not support.

    Fp16 needs a loss scale.
    """
    if precision not in PRECISIONS:
        raise InputError(
            f"precision = {precision!r}: a module of unknown layers is trained in "
            f"{', '.join(PRECISIONS)}"
        )


@names_arguments("executor.trace.module_trainer.ModuleTrainer")
class ModuleTrainer:
    """Training of a module in one process; every rank makes the same calls."""

    def __init__(
        self,
        factory: Factory,
        plan: Plan,
        *,
        precision: Precision = "fp32",
        optimizer: Optimizer = "adamw",
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        check_plan(plan)
        check_precision(precision)
        self.plan, self.max_grad_norm, self.precision = plan, max_grad_norm, precision
        self.device = device or local_device()
        connect(self.device)
        self.grid = ProcessGrid.of(plan, self.device)
        torch.manual_seed(seed)  # every rank starts with the same weights
        self.module = module_of(factory).to(self.device, MASTER_DTYPE[precision])
        if plan.recompute == "full":
            recompute(blocks(self.module).values())
        self._share()
        torch.manual_seed(seed + 1 + self.grid.samples_rank)  # dropout differs
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer = {optimizer!r} (must be {' or '.join(OPTIMIZERS)})")
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[optimizer](
            parameters, lr=learning_rate, weight_decay=weight_decay, foreach=False
        )

    def step(self, batch: Mapping[str, Tensor]) -> tuple[float, float]:
        """Train on a global batch; return its mean loss and the gradient norm before clipping.

        ``batch``: arguments of the module by name, each with global_batch_size rows.
        """
        loss = self.accumulate(batch)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss)
        return float(loss), norm

    def accumulate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run this rank's micro-batches; return its contribution to the mean loss."""
        plan = self.plan
        for name, rows in batch.items():
            if len(rows) != plan.global_batch_size:
                raise InputError(
                    f"{name}: {len(rows)} rows (global_batch_size = {plan.global_batch_size})"
                )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        whole = plan.num_microbatches * plan.data_parallel
        for number in range(plan.num_microbatches):
            self._before_backward(last=number == plan.num_microbatches - 1)
            first = self.grid.samples_rank * plan.num_microbatches + number
            here = slice(first * plan.micro_batch_size, (first + 1) * plan.micro_batch_size)
            loss = self._loss({k: v[here].to(self.device) for k, v in batch.items()}) / whole
            loss.backward()
            total += loss.detach()
        return total

    def _loss(self, arguments: dict[str, Any]) -> Tensor:
        master, compute = MASTER_DTYPE[self.precision], COMPUTE_DTYPE[self.precision]
        kind = self.device.type
        with torch.autocast(kind, compute) if master != compute else nullcontext():
            loss = loss_of(self.module(**arguments))
        if loss is None:
            raise InputError("the module returns no loss (a single number, or an object with one)")
        return loss

    def _share(self) -> None:
        """Shard or replicate the parameters over the data ranks, block by block."""
        if self.plan.data_parallel == 1:
            return
        mesh = self.grid.sharding_mesh()
        for part in (*blocks(self.module).values(), self.module):
            if self.plan.zero_stage == 0:
                replicate(part, mesh=mesh)
                continue
            frees = self.plan.zero_stage == 3 and part is not self.module
            fully_shard(part, mesh=mesh, reshard_after_forward=frees)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # losses are already divided
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale sums

    def _before_backward(self, *, last: bool) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(last)
            self.module.set_reshard_after_backward(last or self.plan.zero_stage == 3)
            self.module.set_requires_gradient_sync(last or self.plan.zero_stage >= 2)

    def _clip(self) -> float:
        """Return the norm of the full gradient, and scale the gradient down to the allowed norm."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        local = [local_tensor(gradient) for gradient in gradients]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in local:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        copies = 1 if self.plan.zero_stage else self.plan.data_parallel
        dist.all_reduce(squares)  # HSDP: every replica holds a copy of each shard
        copies = max(copies, self.plan.dp_replicate)
        norm = float((squares / copies).sqrt())
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            for gradient in local:
                gradient.mul_(self.max_grad_norm / (norm + 1e-6))
        return norm


def module_of(factory: Factory) -> nn.Module:
    """Call the factory; raise an InputError if its result is not a module."""
    module = factory()
    if not isinstance(module, nn.Module):
        raise InputError(f"the factory returns {type(module).__name__} (an nn.Module is expected)")
    return module
