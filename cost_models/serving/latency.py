"""Time to first token, time of an output token and tokens a second of a static batch.

Symbols   N sequences of a replica   P, A tokens of a prompt and of an answer   p stages
          C passes of a prefill   S_i seconds of stage i in one pass, its send included
Units     seconds; everything broadcasts over the columns of a point.

Source: derived; the tests compare both with passes that follow each other through stages one by
one. Leaves out: requests that come and go (continuous batching), and queueing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from cost_models.arrays import Real
from cost_models.compute.rates import rates
from cost_models.partition.stages import PipelineRank
from cost_models.serving.communication import ReplicaLinks
from cost_models.serving.forward_pass import Machine, PassTime, Rows, StagePass, stage_seconds
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.memory import Replica, ServingWorkload
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.serving_engine import ServingEngine


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Seconds of a static batch; ``*_parts`` are sums over all stages that a token passes."""

    prefill: Real  # until every sequence of the batch has its first token
    alone: Real  # until one prompt on an idle replica has its first token
    token: Real  # of an output token of every sequence, mean over the answer
    prefill_parts: PassTime
    token_parts: PassTime
    stage_wait: Real  # part of ``token`` in which stages wait for the slowest
    answer_len: Real

    @property
    def batch(self) -> Real:
        """From the prompts to the last token of the answers: prefill + (A - 1) token."""
        return self.prefill + np.maximum(0.0, self.answer_len - 1.0) * self.token


def machine_of(cluster: Cluster, workload: ServingWorkload, engine: ServingEngine) -> Machine:
    """Return rates and links; raises if no rate is known for the precision.

    fp8 and int8 weights are multiplied in their own precision if the accelerator supports it; other
    formats are dequantised first.
    """
    accelerator = cluster.accelerator
    rest = rates(accelerator, workload.precision, engine)
    matrices = rest
    known = {**accelerator.peak_flops, **accelerator.achievable_flops}
    if workload.weight_precision in ("fp8", "int8") and workload.weight_precision in known:
        matrices = rates(accelerator, workload.weight_precision, engine)
    return Machine(matrices, rest, ReplicaLinks(cluster, engine))


def _summed(passes: Sequence[tuple[int, PassTime]], times: Real = 1.0) -> PassTime:
    """Return the parts of all stages together."""
    return PassTime(
        **{
            f.name: sum((n * getattr(one, f.name) * times for n, one in passes), start=0.0)
            for f in fields(PassTime)
        }
    )


def _passes(
    replica: Replica, machine: Machine, ranks: Sequence[PipelineRank], rows: Rows
) -> list[tuple[int, PassTime]]:
    """Return the seconds of a pass of each distinct rank, and the number of ranks like it."""
    return [
        (rank.multiplicity, stage_seconds(StagePass(replica, machine, rank, rows)))
        for rank in ranks
    ]


def _slowest(passes: Sequence[tuple[int, PassTime]]) -> Real:
    longest: Real = np.max(np.stack([one.total for _, one in passes]), axis=0)
    return longest


def prefill_seconds(
    replica: Replica,
    machine: Machine,
    ranks: Sequence[PipelineRank],
    sequences: Real,
    prompt_len: Real,
) -> tuple[Real, PassTime]:
    """Seconds to read the prompts of some sequences, and the parts of it.

    C passes of equally many tokens, at most a chunk (an encoder: at least a sequence)
    sum(S_i) + (C - 1) max(S_i)      stages work on different passes at a time
    """
    point, model = replica.point, replica.model
    prompts = np.multiply(1.0, sequences) * prompt_len
    chunk = np.multiply(1.0, point.prefill_chunk)
    if any(not kind.attention.causal for kind in model.kinds):
        chunk = np.maximum(chunk, prompt_len)
    count = np.maximum(1.0, np.ceil(prompts / chunk))
    decoder = model.is_encoder_decoder  # behind an encoder: one token each
    rows = Rows(
        tokens=(sequences if decoder else prompts) / count,
        sequences=sequences / count,
        keys=prompt_len,
        decode=False,
        encoder_tokens=prompts / count if decoder else 0.0,
    )
    passes = _passes(replica, machine, ranks, rows)
    through = sum((n * one.total for n, one in passes), start=np.asarray(0.0))
    return through + (count - 1.0) * _slowest(passes), _summed(passes, count)


def token_seconds(
    replica: Replica, machine: Machine, ranks: Sequence[PipelineRank], cached: tuple[Real, Real]
) -> tuple[Real, PassTime, Real]:
    """Mean seconds of an output token, its parts, and the seconds that stages wait for each other.

        max(sum(S_i), g max(S_i))        g = min(p, N) groups of N/g sequences are in flight

    ``cached``: tokens of a sequence at the beginning and at the end.
    """
    point = replica.point
    groups = np.minimum(np.multiply(1.0, point.pipeline_parallel), point.sequences)
    rows = Rows(
        tokens=point.sequences / groups,
        sequences=point.sequences / groups,
        keys=cached[1],
        keys_before=cached[0],
        decode=True,
    )
    passes = _passes(replica, machine, ranks, rows)
    through = sum((n * one.total for n, one in passes), start=np.asarray(0.0))
    token = np.maximum(through, groups * _slowest(passes))
    return token, _summed(passes), token - through


def serving_times(
    replica: Replica, cluster: Cluster, ranks: Sequence[PipelineRank], prompt_len: Real
) -> ServingTimes:
    """Price a static batch: all prompts are read, then every sequence gets its answer.

    ``ranks``: the contents of the pipeline ranks, which all rows of its point share. An encoder
    alone is one prefill; behind an encoder the answer is as long as the prompt may be.
    """
    model, point = replica.model, replica.point
    machine = machine_of(cluster, replica.workload, replica.engine)
    sequences = np.multiply(1.0, point.sequences)
    prefill, prefill_parts = prefill_seconds(replica, machine, ranks, sequences, prompt_len)
    alone, _ = prefill_seconds(replica, machine, ranks, np.asarray(1.0), prompt_len)
    behind = model.is_encoder_decoder
    answer = np.multiply(1.0, point.context_len) - (0.0 if behind else prompt_len)
    if not has_cache(model):
        answer = 0.0 * answer
    first: Real = 1.0 if behind else prompt_len
    last: Real = answer if behind else np.multiply(1.0, point.context_len)
    token, token_parts, wait = token_seconds(replica, machine, ranks, (first, last))
    return ServingTimes(prefill, alone, token, prefill_parts, token_parts, wait, answer)
