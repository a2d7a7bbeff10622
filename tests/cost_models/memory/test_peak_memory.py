from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.memory.allocator import free_shares
from cost_models.memory.ledger import MOMENTS, first
from cost_models.memory.outside_torch import context_bytes
from cost_models.memory.parts import MemoryParts
from cost_models.memory.peak import timelines
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price, rank_memories
from cost_models.scenario import Scenario
from tests.samples import CONFIGS, LLAMA, llama, make_scenario, sample_model


def total_parameters(model: ModelSpec, pipeline: int, tensor: int = 1) -> float:
    table = table_of(Plan(tensor_parallel=tensor, pipeline_parallel=pipeline))
    return float(
        sum(
            rank.multiplicity * rank_parameters(model, rank, table).total[0]
            for rank in even_split_contents(model, pipeline, 1)
        )
    )


def test_no_parameter_is_lost_or_counted_twice() -> None:
    for name in ("llama", "gpt2", "mixtral", "t5", "qwen2.5-0.5b"):
        assert total_parameters(sample_model(name), 1) == sample_model(name).num_parameters
    assert total_parameters(sample_model("llama"), 4) == sample_model("llama").num_parameters


def test_a_tied_projection_is_a_second_copy_on_the_last_stage_of_a_pipeline() -> None:
    model = sample_model("llama tied")
    copy = model.vocab_size * model.hidden_size
    assert total_parameters(model, 1) == model.num_parameters
    assert total_parameters(model, 2) == model.num_parameters + copy
    first, last = even_split_contents(model, 2, 1)
    table = table_of(Plan(tensor_parallel=4, pipeline_parallel=2))
    assert rank_parameters(model, last, table).head == copy / 4 + model.hidden_size
    assert rank_parameters(model, first, table).head == 0
    assert rank_parameters(model, first, table).embedding == copy / 4


def table_of(plan: Plan) -> PlanTable:
    return PlanTable.from_plans([plan])


def memory_of(scenario: Scenario, plan: Plan) -> MemoryParts:
    return price(scenario, table_of(plan)).memory


def test_states_of_an_8_billion_model_by_hand() -> None:
    """bf16 with fp32 master weights, ZeRO-3 on 8: 12 bytes a parameter (and gradients) over 8."""
    scenario = make_scenario("llama-3-8b", seq_len=128, global_batch_size=8)
    memory = memory_of(scenario, Plan(data_parallel=8, zero_stage=3))
    parameters = scenario.model.num_parameters
    assert float(memory.weights[0]) == 4 * parameters / 8  # type: ignore[index]
    assert float(memory.optimizer[0]) == 8 * parameters / 8  # type: ignore[index]
    one = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=128, global_batch_size=1)
    (line,) = timelines(one, Plan(), default_layer_ranges(one, Plan()))
    at_loss, at_update = line[0], line[-1]
    assert float(at_loss.weights) == (2 + 4) * parameters
    assert float(at_loss.optimizer) == 8 * parameters
    assert float(at_update.weights) == 4 * parameters  # the gathered copy has been freed
    assert float(at_update.gradients) == 4 * parameters


def test_the_loss_of_a_large_vocabulary_is_the_peak() -> None:
    big = llama(vocab_size=10**6, num_hidden_layers=1)
    scenario = make_scenario(big, "1xA100-80GB", seq_len=4096, global_batch_size=4)
    priced = price(scenario, table_of(Plan(micro_batch_size=4)))
    assert MOMENTS[int(priced.moment[0])].startswith("loss")
    # bf16 logits, their gradient, and of 16 tokens at a time a copy and probabilities in fp32
    wide = 2 * 4 * 16 * 10**6
    assert priced.memory.logits[0] == (2 + 2) * 10**6 * 4096 * 4 + wide  # type: ignore[index]


def test_without_micro_batches_to_add_up_the_optimizer_step_can_be_the_peak() -> None:
    scenario = make_scenario("llama-3-8b", "1xA100-80GB", seq_len=1, global_batch_size=1)
    priced = price(scenario, table_of(Plan()))
    # gathered weights have gone before the optimizer runs: the last reduction is fuller
    assert MOMENTS[int(priced.moment[0])] in ("optimizer", "embedding")
    assert priced.memory.activations[0] == 0  # type: ignore[index]


def test_earlier_stages_keep_more_micro_batches() -> None:
    scenario = make_scenario("llama", "4xA100-80GB", seq_len=2048, global_batch_size=32)
    plan = Plan(pipeline_parallel=4, num_microbatches=32)
    ranks = rank_memories(scenario, plan, default_layer_ranges(scenario, plan))
    activations = [float(parts.activations) for parts, _ in ranks]
    assert activations[:3] == sorted(activations[:3], reverse=True)
    per_micro_batch = activations[0] - activations[1]
    assert per_micro_batch == pytest.approx(activations[1] - activations[2], rel=1e-9)
    gpipe = replace(plan, pipeline_schedule="gpipe")
    all_kept = rank_memories(scenario, gpipe, default_layer_ranges(scenario, plan))
    # 32 micro-batches instead of 4
    assert float(all_kept[0][0].activations) == pytest.approx(
        activations[0] + 28 * per_micro_batch, rel=0.01
    )


def test_on_a_cpu_there_is_no_context_and_no_allocator() -> None:
    on_gpu = make_scenario("llama", "1xA100-80GB", global_batch_size=1)
    cpu = replace(on_gpu.cluster, accelerator=replace(on_gpu.cluster.accelerator, device="cpu"))
    on_cpu = replace(on_gpu, cluster=cpu)
    assert memory_of(on_cpu, Plan()).runtime[0] == 0  # type: ignore[index]
    gpu = memory_of(on_gpu, Plan())
    software = on_gpu.software
    transient = gpu.gradients + gpu.activations + gpu.logits + gpu.buffers
    table = PlanTable.from_plans([Plan()])
    free = first(free_shares(software, table).needed) * transient[0]  # type: ignore[index]
    architecture = on_gpu.cluster.accelerator.architecture
    expected = context_bytes(software, architecture) + free
    assert gpu.runtime[0] == pytest.approx(expected)  # type: ignore[index]


@st.composite
def questions(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    heads = draw(st.sampled_from([4, 8, 16]))
    family = draw(st.sampled_from(["llama", "mixtral", "gpt2"]))
    config = {
        "llama": LLAMA,
        "mixtral": CONFIGS["mixtral"],
        "gpt2": CONFIGS["gpt2"] | {"n_positions": 10**6},
    }[family]
    if family != "gpt2":
        config = config | {
            "hidden_size": heads * draw(st.sampled_from([8, 64])),
            "num_attention_heads": heads,
            "num_key_value_heads": draw(st.sampled_from([4, heads])),
            "intermediate_size": 16 * draw(st.integers(1, 40)),
            "tie_word_embeddings": draw(st.booleans()),
        }
    data = draw(st.sampled_from([1, 2, 8, 64]))
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 3]))
    plan = Plan(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        zero_stage=draw(st.integers(0, 3)) if data > 1 else 0,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        micro_batch_size=draw(st.integers(1, 8)),
        num_microbatches=pipeline * draw(st.integers(1, 4)),
        pipeline_schedule=draw(st.sampled_from(["1f1b", "gpipe"])) if pipeline > 1 else "1f1b",
    )
    scenario = make_scenario(
        model_spec(config, name="drawn"),
        f"1x{plan.world_size}xA100-80GB",
        seq_len=4 * draw(st.integers(1, 1000)),
        global_batch_size=plan.global_batch_size,
        software=draw(st.sampled_from(["shardplan", "megatron"])),
        attention_kernel=draw(st.sampled_from(["flash", "eager"])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
    )
    return scenario, plan


def peaks(scenario: Scenario, *plans: Plan) -> list[float]:
    found: list[float] = price(scenario, PlanTable.from_plans(plans)).peak.tolist()
    return found


@given(questions())
def test_parts_are_not_negative_and_more_work_never_needs_less(
    asked: tuple[Scenario, Plan],
) -> None:
    scenario, plan = asked
    memory = memory_of(scenario, plan)
    parts = [
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.logits,
        memory.buffers,
        memory.runtime,
    ]
    values = [float(part[0]) for part in parts]  # type: ignore[index]
    assert min(values) >= 0
    here, more = peaks(scenario, plan, replace(plan, micro_batch_size=plan.micro_batch_size + 1))
    assert sum(values) == pytest.approx(here, rel=1e-12)
    assert more >= here
    longer = replace(scenario, workload=replace(scenario.workload, seq_len=1_000 * 4))
    if longer.workload.seq_len >= scenario.workload.seq_len:
        assert peaks(longer, plan)[0] >= here


@given(questions())
def test_more_ranks_never_need_more_memory(asked: tuple[Scenario, Plan]) -> None:
    """With the same micro-batch, sharding a model further leaves less on each rank."""
    scenario, plan = asked
    wider = [replace(plan, tensor_parallel=4)] if plan.tensor_parallel < 4 else []
    if plan.data_parallel > 1:  # the first second rank brings copies to communicate with
        wider.append(replace(plan, data_parallel=2 * plan.data_parallel))
    # without communicators, of which more axes need more
    table = PlanTable.from_plans([plan, *wider])
    here, *there = np.asarray(price(scenario, table).memory.allocated).tolist()
    assert max(there, default=0.0) <= (1 + 1e-12) * here


def test_columns_and_rows_agree_on_the_limiting_rank() -> None:
    scenario = make_scenario("llama", "8xA100-80GB", seq_len=1024, global_batch_size=64)
    plans = [
        Plan(pipeline_parallel=8, num_microbatches=64),
        Plan(pipeline_parallel=4, tensor_parallel=2, num_microbatches=64),
        Plan(pipeline_parallel=2, tensor_parallel=4, num_microbatches=64),
    ]
    priced = price(scenario, PlanTable.from_plans(plans))
    for row, plan in enumerate(plans):
        ranks = rank_memories(scenario, plan, default_layer_ranges(scenario, plan))
        assert priced.limiting_rank[row] == np.argmax([float(p.peak) for p, _ in ranks])


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_megatron_reduces_in_the_buffer_of_its_gradients(zero_stage: int) -> None:
    """At most the gradients of two matrices, or of a table, are apart from it, in 16 bits."""
    plan = Plan(data_parallel=8, expert_parallel=2, zero_stage=zero_stage)

    def buffers(software: str) -> float:
        scenario = make_scenario("mixtral", seq_len=8, global_batch_size=8, software=software)
        (line,) = timelines(scenario, plan, default_layer_ranges(scenario, plan))
        return max(float(at.buffers) for at in line)

    model = sample_model("mixtral")
    (rank,) = even_split_contents(model, 1, 1)
    params = rank_parameters(model, rank, table_of(plan))
    largest = max(first(params.largest_pair), first(params.head), first(params.embedding))
    assert buffers("megatron") == 2.0 * largest
    assert buffers("torch-trainer") > 2.0 * first(params.largest_layer) > 2.0 * largest


def test_megatron_keeps_fp32_gradients_of_all_weights_from_the_start() -> None:
    """One micro-batch or many, sharded optimizer or not: 4 bytes a parameter."""
    scenario = make_scenario("llama", seq_len=64, global_batch_size=64, software="megatron")
    for zero, microbatches in ((0, 1), (0, 8), (1, 1), (1, 8)):
        micro = 64 // 8 // microbatches
        plan = Plan(8, zero_stage=zero, micro_batch_size=micro, num_microbatches=microbatches)
        memory = memory_of(scenario, plan)
        assert float(np.ravel(memory.gradients)[0]) == 4.0 * scenario.model.num_parameters
