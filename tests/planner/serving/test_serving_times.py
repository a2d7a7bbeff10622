"""fit --inference: the times it prints and their JSON."""

import json
import shlex

import pytest

import planner
from planner.cli.app import main
from planner.serving.answer import ServingAnswer


def served(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["fit", *shlex.split(words)])
    return capsys.readouterr().out


def test_json_has_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3-8b 8xA100-80GB --inference --concurrency 32 --context-len 4096"
    answer = json.loads(served(f"{words} --prompt-len 3000 --json", capsys))
    time, workload = answer["time"], answer["workload"]
    assert (time["prompt_len"], time["answer_len"]) == (3000, 1096)
    assert (workload["prompt_len"], workload["cuda_graphs"]) == (3000, True)
    assert time["sequences_per_replica"] * answer["plan"]["data_parallel"] == 32
    assert time["time_to_first_token_seconds"] < time["prefill_seconds"] < time["batch_seconds"]
    for name in ("time_to_first_token", "time_per_output_token"):
        low, mid, high = (time[f"{name}{end}_seconds"] for end in ("_low", "", "_high"))
        assert low < mid < high
    batch = time["prefill_seconds"] + 1095 * time["time_per_output_token_seconds"]
    assert time["batch_seconds"] == pytest.approx(batch)
    assert time["output_tokens_per_second"] == pytest.approx(32 * 1096 / batch)
    assert time["output_tokens_per_second_per_gpu"] == pytest.approx(32 * 1096 / batch / 8)
    parts = time["parts"]["token"]
    assert sum(parts.values()) == pytest.approx(time["time_per_output_token_seconds"])


def test_text_says_first_token_and_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3-8b 8xA100-80GB --inference --concurrency 32 --context-len 4096"
    text = served(words, capsys)
    assert "first token of 2,048 tokens after" in text
    assert "tokens/s a sequence" in text
    assert "prompts of 2,048" in text
    text = served(f"{words} -v", capsys)
    assert "prompt_len 2048 (default: half of context_len" in " ".join(text.split())
    assert all(len(line) <= 100 for line in text.splitlines())


def test_eager_engines_are_slower_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3-8b 1xH100-SXM-80GB --inference --context-len 2048 --no-cuda-graphs"
    text = served(f"{words} -v", capsys)
    assert "waiting for the host" in text
    assert "--enforce-eager" in text
    assert "--no-cuda-graphs" not in served(f"{words.rsplit(' ', 1)[0]} --tp 1", capsys)


def test_encoders_take_one_pass_and_accelerators_without_a_rate_none() -> None:
    answer = planner.fit("bert-base", "1xA100-80GB", inference=True, concurrency=4)
    assert isinstance(answer, ServingAnswer)
    assert answer.time is not None
    assert answer.time.token is None
    assert "one sequence of 512 tokens after" in str(answer)
    old = planner.fit("gpt2", "1xV100-SXM2-32GB", inference=True, precision="bf16")
    assert isinstance(old, ServingAnswer)
    assert old.time is None
    assert any("time is not predicted" in words for words in old.assumptions)


def test_ways_out_keep_what_was_said_of_the_prompt() -> None:
    answer = planner.fit(
        "llama-3-70b",
        "1xH100-SXM-80GB",
        inference=True,
        concurrency=64,
        context_len=8192,
        prompt_len=6000,
        weight_precision="int4",
    )
    assert isinstance(answer, ServingAnswer)
    assert answer.verdict == "does_not_fit"
    for way in answer.ways_out:
        command = way.command.split()
        prompt = command[command.index("--prompt-len") + 1] if "--prompt-len" in command else None
        context = int(command[command.index("--context-len") + 1])
        assert prompt is None or int(prompt) <= context


@pytest.mark.parametrize("cluster", ["1xA100-80GB", "1xRTX-4090", "8xMI300X", "8xB200", "1xL40S"])
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_no_interval_beats_the_roofline(cluster: str, precision: str) -> None:
    """A prompt takes its FLOP at the peak, a token its weights at the memory's bandwidth."""
    answer = planner.fit(
        "llama-3-8b",
        cluster,
        inference=True,
        concurrency=1,
        context_len=4096,
        weight_precision=precision,
        tensor_parallel=1,
    )
    assert isinstance(answer, ServingAnswer)
    time, chip = answer.time, answer.scenario.cluster.accelerator
    assert time is not None
    assert time.token is not None
    flops = 2 * 6.98e9 * time.prompt_len  # of the layers' matrices alone
    assert time.first_token_low_seconds >= flops / chip.peak_flops["bf16"].value
    read = 6.97e9 * (2.0 if precision == "bf16" else 0.5)
    assert time.token.low_seconds >= read / chip.memory_bandwidth.value
    assert time.first_token_low_seconds <= time.first_token_seconds
    assert time.token.low_seconds <= time.token.seconds
