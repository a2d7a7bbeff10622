"""Small models, settings and tables of plans that several tests use."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from msgspec import structs
from msgspec.structs import asdict

from cost_models.arrays import Count, Real
from cost_models.legality.rules import legality_codes
from cost_models.memory.ledger import total
from cost_models.memory.model_states import (
    accumulated_gradients,
    optimizer_shards,
    weight_rows,
)
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank, even_split_contents
from cost_models.plan.plan import SCHEDULES, SEARCHED_RECOMPUTE, Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from cost_models.step_time.parts import RankSeconds
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.profile import Learned, LearnedRun, Unexplained
from hardware_profiles.software.trainer import SoftwareProfile, software_profile


def examples(count: int) -> int:
    """Examples that hypothesis draws: ``count`` in the thorough profile, else about a tenth."""
    thorough = settings.default.max_examples >= 100
    return count if thorough else max(min(count, 2), count // 10)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
GPT3 = {
    "model_type": "gpt2",
    "n_embd": 12288,
    "n_head": 96,
    "n_layer": 96,
    "n_positions": 2048,
    "vocab_size": 51200,
    "activation_function": "gelu",
}
# one of each kind that the formulas tell apart
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied": LLAMA | {"tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 8,
        "n_layer": 6,
        "n_positions": 512,
        "vocab_size": 512,
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 4},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 128,
        "num_layers": 4,
        "num_heads": 8,
        "vocab_size": 512,
    },
}


def llama(**changes: Any) -> ModelSpec:
    return model_spec(LLAMA | changes, name="tiny")


@cache
def sample_model(name: str, **changes: Any) -> ModelSpec:
    if name in CONFIGS:
        return model_spec(CONFIGS[name] | changes, name=name)
    return model_spec(load_preset(name).config, name=name)


def zero_states(parameters: float, ranks: int, zero_stage: Any) -> Any:
    """Return bytes of model states as the ZeRO paper counts them: Adam, 16-bit weights, gradients.

    Our rows, and under ZeRO-3 the shards in compute precision that DeepSpeed has next to fp32 ones.
    """
    kept = accumulated_gradients(
        parameters, ranks, zero_stage, 2.0, accumulates=True, defers_reduction=False
    )
    states = 8.0 * parameters / optimizer_shards(ranks, zero_stage)
    shards = np.where(np.equal(zero_stage, 3), 2.0 * parameters / ranks, 0.0)
    weights = total(weight_rows(parameters, ranks, zero_stage, 2.0, 4.0))
    return weights + states + kept.size + shards


def rank_view(
    model: ModelSpec,
    workload: Workload,
    software: SoftwareProfile | None,
    plans: PlanTable | Plan,
    rank: PipelineRank | None = None,
) -> RankView:
    """Return a rank's view on a GPU cluster that its formulas do not read.

    Without a ``rank`` that of the only stage.
    """
    trainer = software or software_profile("shardplan")
    scenario = Scenario(model, parse_cluster("8xA100-80GB"), workload, trainer)
    table = PlanTable.from_plans([plans]) if isinstance(plans, Plan) else plans
    if rank is None:
        (rank,) = even_split_contents(model, 1, 1)
    return RankView(scenario, table, rank)


def make_scenario(
    model: str | ModelSpec = "llama",
    cluster: str = "8xA100-80GB",
    *,
    seq_len: int = 256,
    global_batch_size: int = 16,
    software: str = "shardplan",
    **workload: Any,
) -> Scenario:
    spec = sample_model(model) if isinstance(model, str) else model
    return Scenario(
        spec,
        parse_cluster(cluster),
        Workload(seq_len, global_batch_size, **workload),
        software_profile(software),
    )


def with_memory(scenario: Scenario, size: float) -> Scenario:
    """Return the scenario on accelerators with so many bytes."""
    chip = scenario.cluster.accelerator
    capacity = replace(chip.memory_capacity, value=size)
    chip = replace(chip, memory_capacity=capacity, usable_memory=None)
    return replace(scenario, cluster=replace(scenario.cluster, accelerator=chip))


def learned(scenario: Scenario, *weights: float, accelerator: str = "A100-SXM-80GB") -> Scenario:
    """Return a scenario whose trainer was learned from runs that mechanisms do not explain."""
    gpus = scenario.cluster.num_gpus
    ranks = [(gpus, 1, 1), (gpus // 2, 1, 2), (gpus // 2, 2, 1)]  # data, tensor, pipeline
    runs = tuple(
        LearnedRun(
            run=f"run {number}",
            weight=weight,
            num_parameters=scenario.model.num_parameters,
            seq_len=scenario.workload.seq_len,
            micro_batch_size=2,
            num_microbatches=1,
            data_parallel=data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            context_parallel=1,
            expert_parallel=1,
            precision="bf16",
            adapter="none",
            attention_kernel="flash",
        )
        for number, (weight, (data, tensor, pipeline)) in enumerate(
            zip(weights or (0.3, 0.6, -0.9), ranks, strict=False)
        )
    )
    left = Unexplained(length=2.0, source="a test", runs=runs)
    found = Learned(runs=len(runs), accelerator=accelerator, unexplained=left)
    return replace(scenario, software=structs.replace(scenario.software, learned=found))


def all_plans(
    scenario: Scenario,
    *,
    virtual_stages: tuple[int, ...] = (1, 2, 3, 4),
    recompute: tuple[str, ...] = SEARCHED_RECOMPUTE,
    replicas: bool = False,
    experts: bool = False,
) -> Iterator[Plan]:
    """Every plan that uses all accelerators and the whole batch, legal or not, by nested loops."""
    gpus, batch = scenario.cluster.num_gpus, scenario.workload.global_batch_size
    for data, tensor in itertools.product(range(1, gpus + 1), repeat=2):
        if gpus % (data * tensor) or batch % data:
            continue
        share = batch // data
        shared = [n for n in range(1, gpus + 1) if gpus % n == 0] if experts else [1]
        copies = [n for n in range(1, data + 1) if data % n == 0] if replicas else [1]
        for copy, expert, cut, micro, virtual, schedule, zero, sequence, again in itertools.product(
            copies,
            shared,
            (True, False) if experts else (True,),
            [size for size in range(1, share + 1) if share % size == 0],
            virtual_stages,
            SCHEDULES,
            range(4),
            (False, True),
            recompute,
        ):
            yield Plan(
                data_parallel=data,
                dp_replicate=copy,
                expert_parallel=expert,
                expert_tensor_parallel=cut,
                tensor_parallel=tensor,
                pipeline_parallel=gpus // (data * tensor),
                virtual_stages=virtual,
                pipeline_schedule=schedule,  # type: ignore[arg-type]
                zero_stage=zero,
                sequence_parallel=sequence,
                recompute=again,  # type: ignore[arg-type]
                micro_batch_size=micro,
                num_microbatches=share // micro,
            )


@cache
def legal_table(scenario_key: tuple[str, str, int, int, str, str]) -> tuple[Scenario, PlanTable]:
    """A scenario and all its legal plans; the key is hashable so that it is made once."""
    model, cluster, seq_len, batch, software, kernel = scenario_key
    scenario = make_scenario(
        model,
        cluster,
        seq_len=seq_len,
        global_batch_size=batch,
        software=software,
        attention_kernel=kernel,
    )
    table = PlanTable.from_plans(list(all_plans(scenario)))
    return scenario, table.rows(legality_codes(scenario, table) == 0)


def columns(record: Any) -> dict[str, np.ndarray]:
    """The fields of a record of columns."""
    return {name: np.asarray(column) for name, column in asdict(record).items()}


def rank_of(microbatch: float, *, data: float = 0.0, optimizer: float = 0.0) -> RankSeconds:
    """A rank whose micro-batch takes one third forward and two thirds backward."""
    zero = np.zeros(1)
    return RankSeconds(
        compute=np.array([microbatch]),
        recompute=zero,
        host=zero,
        tensor_communication=zero,
        pipeline_communication=zero,
        backward=np.array([2 * microbatch / 3]),
        weights=np.array([microbatch / 3]),
        data_communication=np.array([data]),
        optimizer=np.array([optimizer]),
    )


def bubble_fraction(
    num_microbatches: Count, pipeline_parallel: Count, virtual_stages: Count
) -> Real:
    """Bubble time over ideal time of a pipeline of equal stages: (p - 1) / (v m).

    Source: Narayanan et al. (arXiv:2104.04473), sec. 2.2.1 and 2.2.2 (v = 1: GPipe and 1F1B alike).

    >>> float(bubble_fraction(8, 4, 1)), float(bubble_fraction(8, 4, 2))
    (0.375, 0.1875)
    """
    return np.subtract(pipeline_parallel, 1.0) / np.multiply(virtual_stages, num_microbatches)
