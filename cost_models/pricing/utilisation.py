"""Model FLOP utilisation: the FLOP that count, and the convention that counts them.

    MFU   F / (step · ranks · peak)      HFU   MFU · (1 + recompute / compute)

Symbols   F  model FLOP of a step   peak  FLOP/s of the datasheet, dense, of the precision executed
Units     FLOP, seconds

PaLM's convention counts attention scores in full, causal or not. A flash kernel skips the scores
that a mask hides, so that for long sequences scores in full are more than the accelerator can
compute at its peak. There only the scores that masks keep count. This holds where

    scores in full / scores kept (of all FLOP)  >  peak / rate of the best matmul in long runs

and no MFU exceeds 100 %, because no step is shorter than its kept FLOP at that rate.

Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B; Korthikanti et al.
(arXiv:2205.05198), sec. 6.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from cost_models.activations.document_masks import as_computed
from cost_models.communication.seconds import links_may_differ
from cost_models.compute.flops import model_flops_per_step
from cost_models.compute.rates import multiplied_precision, peak_of, training_rates
from cost_models.model.target_length import with_target_length
from cost_models.scenario import Scenario
from cost_models.uncertainty import interval, time_spread, with_assumed_links

FULL: Final = (
    "model FLOP: 6 N + 12 L h s a token (scores in full, causal or not), of trained parts only; "
    "over the datasheet's dense peak of the precision"
)
KEPT: Final = (
    "model FLOP: 6 N + 12 L h k a token, k the mean number of keys that the mask keeps (scores in "
    "full would exceed the peak), of trained parts only; over the datasheet's dense peak of the "
    "precision"
)


class CountedFlops(NamedTuple):
    """Model FLOP of a step, and the convention that counts them."""

    flops: float
    convention: str


def counted_flops(scenario: Scenario) -> CountedFlops:
    """Return the model FLOP of a step that MFU counts."""
    workload = scenario.workload
    model = with_target_length(scenario.model, workload)
    sizes = workload.seq_len, workload.global_batch_size
    full = float(model_flops_per_step(model, *sizes))
    peak = peak_flops(scenario)
    if peak is None or workload.attention_kernel != "flash":
        return CountedFlops(full, FULL)
    kept, rate = _kept_flops(scenario), _matmul_rate(scenario)
    return CountedFlops(full, FULL) if full * rate <= kept * peak else CountedFlops(kept, KEPT)


def least_step(scenario: Scenario) -> float:
    """Return a lower bound of every plan's step on GPUs: the kept FLOP of all at the best rate."""
    flops = _kept_flops(scenario) if scenario.on_gpu else 0.0
    return flops / (_matmul_rate(scenario) * scenario.cluster.num_gpus)


def _kept_flops(scenario: Scenario) -> float:
    """Return the model FLOP of a step with the scores that masks keep alone."""
    workload = scenario.workload
    model = with_target_length(scenario.model, workload)
    kinds = tuple(as_computed(kind, workload, scenario.software) for kind in model.kinds)
    sizes = workload.seq_len, workload.global_batch_size
    return float(model_flops_per_step(replace(model, kinds=kinds), *sizes, masked=True))


def _matmul_rate(scenario: Scenario) -> float:
    """Return the FLOP/s of the best matmul in long runs."""
    accelerator, precision = scenario.cluster.accelerator, scenario.workload.precision
    return training_rates(accelerator, precision, scenario.software).matmul


def peak_flops(scenario: Scenario) -> float | None:
    """Return the peak of an accelerator in the precision of the matmuls; None: unknown."""
    precision = multiplied_precision(scenario.workload.precision, scenario.software)
    return peak_of(scenario.cluster.accelerator, precision)


def time_interval(
    scenario: Scenario, step: float, hfu: float | None, communication: float
) -> tuple[float, float]:
    """Return the low and high end of a step's 90 % interval.

    Wider by the part of ``communication`` (seconds of a step) that rests on an assumed bandwidth.
    The low end is no shorter than the counted FLOP and the recomputed ones at the accelerator's
    peak: HFU is 100 % there.
    """
    spread = time_spread(
        scenario.software.name, scenario.cluster.accelerator, experts=scenario.model.has_experts
    )
    low, high = interval(step, spread)
    factor = links_may_differ(scenario.cluster)
    low, high = with_assumed_links(low, high, communication, factor)
    return max(low, min(step, step * hfu)) if hfu is not None else low, high


def hardware_utilisation(mfu: float | None, compute: float, recompute: float) -> float | None:
    """Return HFU, which counts recomputation: FLOP of the hardware, not of the model."""
    return None if mfu is None else mfu * (1.0 + recompute / compute)
