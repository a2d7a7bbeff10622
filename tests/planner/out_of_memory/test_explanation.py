"""``shardplan oom``: figures, place and advice of torch's out-of-memory errors."""

import re
from dataclasses import replace

import pytest

from hardware_profiles.errors import InputError
from planner.out_of_memory.explanation import explain_out_of_memory
from planner.out_of_memory.report import read_report
from planner.out_of_memory.run import priced_run
from planner.request.requests import StatedRun

# sentences as c10/cuda/CUDACachingAllocator.cpp of torch 2.5 prints them; frames are made up
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. GPU 3 has a total "
    "capacity of 79.15 GiB of which 1.62 GiB is free. Including non-PyTorch memory, this process "
    "has 77.51 GiB memory in use. Of the allocated memory 70.10 GiB is allocated by PyTorch, and "
    "6.75 GiB is reserved by PyTorch but unallocated."
)
# torch 1.13
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total "
    "capacity; 13.46 GiB already allocated; 5.75 MiB free; 13.60 GiB reserved in total by PyTorch)"
)


def traceback(*frames: tuple[str, str, str]) -> str:
    lines = [f'  File "{file}", line 7, in {name}\n    {code}' for file, name, code in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, NEW.format("3.91")])


LIB = "/v/site-packages/"
CALL = (f"{LIB}torch/nn/modules/module.py", "_call_impl", "return forward_call(*args)")
BACK = (f"{LIB}torch/autograd/graph.py", "_engine_run_backward", "return engine.run_backward()")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (
            [("train.py", "main", "out = model(x)"), CALL, ("net.py", "forward", "h = a @ b")],
            "forward",
        ),
        (
            [
                ("t.py", "main", "out = model(x)"),
                CALL,
                (f"{LIB}torch/nn/functional.py", "cross_entropy", ""),
            ],
            "loss",
        ),
        ([("t.py", "main", "loss.backward()"), BACK], "backward"),
        (
            [("t.py", "main", "loss.backward()"), BACK, CALL, ("net.py", "forward", "h")],
            "backward (recomputation)",
        ),
        (
            [
                ("t.py", "main", "opt.step()"),
                (f"{LIB}torch/optim/adam.py", "_multi_tensor_adam", ""),
            ],
            "optimizer",
        ),
        (
            [
                ("t.py", "main", "model.to(device)"),
                (f"{LIB}torch/nn/modules/module.py", "_apply", ""),
            ],
            "loading the model",
        ),
    ],
)
def test_the_part_of_the_step_is_that_of_the_innermost_frame(
    frames: list[tuple[str, str, str]], phase: str
) -> None:
    assert read_report(traceback(*frames)).phase == phase


def test_figures_of_two_generations_of_torch() -> None:
    new, old = read_report(NEW.format("3.91")), read_report(OLD)
    assert (new.device, new.requested / 2**30, new.capacity) == (3, 3.91, 79.15 * 2**30)
    assert new.unallocated == 6.75 * 2**30
    assert new.is_fragmented
    assert not read_report(NEW.format("7.00")).is_fragmented
    assert old.unallocated == pytest.approx(0.14 * 2**30, rel=0.01)
    assert old.allocated == 13.46 * 2**30


@pytest.mark.parametrize(
    ("listed", "others"),
    [
        ("Including non-PyTorch memory, this process has 15.32 GiB memory in use", 0.0),
        ("Process 7 has 0.50 GiB memory in use. this process has 15.3 GiB memory in use", 0.5),
        ("Process 7 has 15.32 GiB memory in use", 0.0),  # itself, in a container
        ("Process 7 has 0.50 GiB memory in use. Process 9 has 15.3 GiB memory in use", 0.5),
        ("Process 7 has 0.50 GiB memory in use. Process 9 has 0.25 GiB memory in use", 0.75),
    ],
)
def test_other_processes_are_those_that_are_not_this_one(listed: str, others: float) -> None:
    message = NEW.format("3.91").replace("70.10", "14.12").replace("6.75", "0.40")
    start, end = message.split("Including")[0], message.split("in use.")[1]
    assert read_report(f"{start}{listed}.{end}").others == others * 2**30


def test_advice_follows_place_and_fragmentation() -> None:
    text = traceback(
        ("t.py", "main", "out = model(x)"), CALL, ("loss_utils.py", "cross_entropy", "")
    )
    answer = str(explain_out_of_memory(text))
    assert "GPU 3 has no room for a tensor of 3.9 GiB (during: loss)" in answer
    assert answer.index("expandable_segments") < answer.index("chunked")
    whole = NEW.format("7.00")
    assert "expandable_segments" not in str(explain_out_of_memory(whole))


@pytest.mark.parametrize("text", ["", "all is well", "RuntimeError: CUDA error: out of memory"])
def test_other_texts_are_one_line(text: str) -> None:
    with pytest.raises(InputError, match="Tried to allocate"):
        read_report(text)


def test_the_lines_of_one_rank_are_read() -> None:
    """Of torchrun's output, in which those of all ranks are mixed."""
    ranks = [
        f"Traceback (most recent call last):\n  File {frame}"
        for frame in (
            '"a.py", line 3, in forward\n    x = mlp(x)',
            '"b.py", line 9, in forward\n    y = logits.float()',
        )
    ]
    mixed = [
        f"[rank{rank}]: {line}"
        for lines in zip(*(text.split("\n") for text in ranks), strict=True)
        for rank, line in enumerate(lines)
    ]
    error = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 1"
    found = read_report("\n".join([*mixed, error]))
    assert (found.place, found.code, found.phase) == (
        "b.py: forward (9)",
        "y = logits.float()",
        "loss",
    )


def test_a_run_is_priced_as_stated_and_as_its_traceback_shows() -> None:
    """Nothing is searched: one rank of 8 without ZeRO keeps 18 bytes of each parameter and more."""
    text = traceback(
        (f"{LIB}transformers/trainer.py", "training_step", "loss"),
        (f"{LIB}torch/utils/checkpoint.py", "checkpoint", "ret"),
        CALL,
    )
    run = StatedRun(model="llama-3-8b", cluster="8xA100-80GB", seq_len=2048, micro_batch_size=4)
    priced = priced_run(run, text)
    assert priced is not None
    plan = priced.plan
    assert (plan.data_parallel, plan.zero_stage, plan.recompute) == (8, 0, "full")
    assert priced.assessment.memory.peak_bytes > 16 * 8.03e9
    assert priced.scenario.software.name == "hf-trainer"
    answer = str(explain_out_of_memory(text, priced))
    assert "zero_stage 0" in answer
    assert "--zero" in answer.split("Would fit:")[1]
    sharded = priced_run(replace(run, zero_stage=3), text)
    assert sharded is not None
    assert sharded.plan.zero_stage == 3


def test_offloading_says_what_the_host_needs() -> None:
    priced = priced_run(StatedRun(model="llama-3-8b", cluster="1x4090"), traceback(CALL))
    fixes = str(explain_out_of_memory(traceback(CALL), priced)).split("Would fit:")[1]
    offload = " ".join(fixes.partition("--offload")[2].split())
    assert re.match(r"weights .*?\(with \d+ GiB host memory\)", offload)


def test_options_of_a_run_need_its_model_and_cluster() -> None:
    assert priced_run(StatedRun(), "") is None
    with pytest.raises(InputError, match="--micro-batch-size, --model: a run is priced with both"):
        priced_run(StatedRun(model="gpt2", micro_batch_size=2), "")
