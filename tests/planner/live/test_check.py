"""``planner.check`` reads a live module and answers as ``fit`` does for the same run."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import planner  # noqa: E402
from hardware_profiles.errors import InputError  # noqa: E402
from planner.live.adapters import frozen_parts  # noqa: E402
from planner.live.optimizers import optimizer_of  # noqa: E402

CLUSTER = "1xA100-80GB"


def llama(dtype: Any = torch.float32, **sizes: Any) -> Any:
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512} | sizes
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(dtype)


def test_a_known_model_is_priced_as_fit_prices_its_config() -> None:
    model = llama(torch.bfloat16)
    batch = {"input_ids": torch.zeros(4, 256, dtype=torch.long)}
    answer = planner.check(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        inputs=batch,
        cluster=CLUSTER,
    )
    same = planner.fit(
        model.config.to_dict(),
        CLUSTER,
        seq_len=256,
        micro_batch_size=4,
        num_microbatches=1,
        data_parallel=1,
        zero_stage=0,
        recompute="none",
        precision="bf16",
        master_weights=False,
        optimizer="adamw",
        software="hf-trainer+adamw-fused",
    )
    assert answer.peak_bytes == same.assessment.memory.peak_bytes
    assert answer.step_seconds == same.assessment.time.step_seconds
    assert len(answer.lines) == 3
    assert "FITS" in answer.lines[0]
    estimate = planner.estimate_memory(model, inputs=(4, 256), cluster=CLUSTER)
    assert estimate.table["bytes"].is_monotonic_decreasing
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_autocast_recompute_and_frozen_layers_are_read() -> None:
    model = llama()
    model.activation_checkpointing_enable()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        answer = planner.check(model, inputs=(1, 64), cluster=CLUSTER)
    scenario, plan = answer.fit.scenario, answer.fit.plan
    assert (scenario.workload.precision, scenario.workload.master_weights) == ("bf16", True)
    assert plan.recompute == "full"
    assert scenario.workload.freeze == "layers:0-0"
    assert "autocast" in scenario.software.name


def test_a_module_of_unknown_layers_is_traced_and_not_touched() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    before = {name: (value.data_ptr(), value.clone()) for name, value in net.state_dict().items()}
    answer = planner.check(
        net,
        optimizer=torch.optim.Adam(net.parameters()),
        inputs=torch.zeros(8, 64),
        cluster=CLUSTER,
    )
    parts = planner.estimate_memory(net, inputs=torch.zeros(8, 64), cluster=CLUSTER).parts
    count = sum(parameter.numel() for parameter in net.parameters())
    assert parts["weights"] == 4 * count
    assert answer.fit.scenario.workload.optimizer == "adam"
    for name, value in net.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    assert all(parameter.grad is None for parameter in net.parameters())


def test_other_heads_than_a_language_models_are_traced() -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    with pytest.raises(InputError, match="inputs=BATCH"):
        planner.check(model, inputs=(2, 16), cluster=CLUSTER)


@pytest.mark.parametrize(
    ("given", "name", "kernel"),
    [
        ("adamw_torch_fused", "adamw", "fused"),
        ("PagedAdamW8bit", "paged_adamw_8bit", None),
        ("PagedLion8bit", "lion_8bit", None),
        (torch.optim.Adafactor, "adafactor", None),
        (torch.optim.SGD([torch.zeros(1)], 0.1, momentum=0.9), "sgd_momentum", None),
        (torch.optim.AdamW([torch.zeros(1)], foreach=False), "adamw", "for-loop"),
    ],
)
def test_optimizers_are_known_by_their_classes(given: Any, name: str, kernel: str | None) -> None:
    assert optimizer_of(given)[:2] == (name, kernel)


def test_an_unknown_optimizer_or_input_is_one_line() -> None:
    model = llama()
    with pytest.raises(InputError, match="optimizer 'Prodigy' is not known"):
        planner.check(model, optimizer="Prodigy", inputs=(1, 64), cluster=CLUSTER)
    with pytest.raises(InputError, match="inputs = str"):
        planner.check(model, inputs="a text", cluster=CLUSTER)
    with pytest.raises(InputError, match=r"must be an nn\.Module"):
        planner.check("gpt2", cluster=CLUSTER)


def test_parts_that_no_word_describes_are_not_taken_for_frozen_layers() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    assert frozen_parts(model) is None


@pytest.mark.filterwarnings("default")  # of peft about transformers 5
def test_adapters_of_peft_are_read() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    answer = planner.check(
        peft.get_peft_model(llama(torch.bfloat16), settings), inputs=(1, 64), cluster=CLUSTER
    )
    workload = answer.fit.scenario.workload
    assert (workload.adapter, workload.adapter_rank, workload.adapter_alpha) == ("lora", 8, 32.0)
    assert workload.adapter_targets == "q,v"
