"""``fit`` and ``plan`` of a module of unknown layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.plan.plan import Plan
from cost_models.traced.module import TracedModule
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.cli.app import main
from planner.request import executor_process
from planner.text.answer import json_text
from planner.traced import fit_and_plan as traced_front_door
from tests.traced_sample import large, sample

NET = "module:package.nets:net"
CLUSTER = "8xA100-80GB"
Traces = Callable[[TracedModule], list[dict[str, Any]]]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """Have a module's trace be given; returns what is asked of the executor."""

    def use(module: TracedModule) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def trace(name: str, **options: Any) -> TracedModule:
            asked.append({"name": name, **options})
            return module

        monkeypatch.setattr(traced_front_door, "trace", trace)
        return asked

    return use


def test_a_module_that_fits(traces: Traces) -> None:
    asked = traces(sample())
    answer = planner.fit(NET, CLUSTER, precision="fp32", inputs=["x=float32[B,4]"])
    assert asked == [
        {"name": NET, "precision": "fp32", "device": "cuda", "inputs": ["x=float32[B,4]"]}
    ]
    assert answer.verdict == "fits"
    assert answer.plan == Plan(8)
    document = json.loads(json_text(answer.to_dict()))
    assert document["model"]["parameters"] == 96
    assert document["confidence"] == "traced"
    assert document["time"]["low_seconds"] is None
    parts = sum(document["memory"]["parts"].values())
    assert parts == pytest.approx(document["memory"]["peak_bytes"])
    assert "a note of the trace" in document["assumptions"]
    assert "Plan(data_parallel=8)" in document["train_with"]
    assert document["reach"]["largest_micro_batch_size"] == 65_536
    text = answer.text(verbose=True)
    for words in ("FITS", "--dp 8 --zero 0", "peak in ", "roofline", "ModuleTrainer(load_factory("):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_does_not_fit_names_ways_out_that_do(traces: Traces) -> None:
    traces(large(5e7))
    answer = planner.fit(NET, CLUSTER, precision="fp32", micro_batch_size=6, recompute="none")
    assert answer.verdict == "does_not_fit"
    assert answer.ways_out
    for way in answer.ways_out:
        plan = way.plan
        cluster = CLUSTER if way.num_gpus == 8 else f"{way.num_gpus // 8}x{CLUSTER}"
        again = planner.fit(
            NET,
            cluster,
            precision="fp32",
            global_batch_size=plan.global_batch_size,
            zero_stage=plan.zero_stage,
            recompute=plan.recompute,
            micro_batch_size=plan.micro_batch_size,
        )
        assert again.verdict == "fits", way.change
        assert again.assessment.memory.peak_bytes == way.peak_bytes
    assert "Fixes" in str(answer)


def test_the_fastest_plan_that_fits_is_taken(traces: Traces) -> None:
    traces(large(5e7))
    rows = 6
    none = planner.fit(NET, CLUSTER, precision="fp32", micro_batch_size=rows, recompute="none")
    answer = planner.fit(NET, CLUSTER, precision="fp32", micro_batch_size=rows)
    assert none.verdict != "fits"
    assert (answer.plan.recompute, answer.verdict) == ("full", "fits")
    assert any("searched: the fastest that fits" in said for said in answer.assumptions)


def test_the_best_plan_is_the_best_of_all(traces: Traces) -> None:
    traces(large(1e7))
    answer = planner.plan(NET, CLUSTER, precision="fp32", global_batch_size=64, top=1000)
    documents = answer.assessments
    seconds = [document.time.step_seconds for document in documents]
    assert seconds == sorted(seconds)
    assert answer.search.enumerated == 4 * 2 * 4  # ZeRO, recompute, divisors of 8 rows
    assert len(documents) == answer.search.fitting
    for plan, document in zip(answer.plans, documents, strict=True):
        alone = planner.fit(
            NET, CLUSTER, precision="fp32", global_batch_size=64, **_options(plan)
        ).assessment
        assert alone == document
    assert list(answer.table.step_seconds) == seconds
    assert "Searched   32 plans" in answer.text(verbose=True)
    assert max(map(len, str(answer).splitlines())) <= 100
    pinned = planner.plan(NET, CLUSTER, global_batch_size=64, fix="zero=1,mbs=2")
    assert {(p.zero_stage, p.micro_batch_size) for p in pinned.plans} == {(1, 2)}
    json.loads(json_text(pinned.to_dict()))


def _options(plan: Plan) -> dict[str, Any]:
    names = ("zero_stage", "recompute", "micro_batch_size", "num_microbatches")
    return {name: getattr(plan, name) for name in names}


def test_no_plan_says_what_would_help(traces: Traces) -> None:
    traces(large(2e9))
    with pytest.raises(NoLegalPlanError, match="0 fit; the smallest") as caught:
        planner.plan(NET, CLUSTER, precision="fp32")
    assert caught.value.document["plans"] == []
    assert " of 79.2 GiB" in str(caught.value)


def test_a_module_is_asked_about_one_cluster() -> None:
    with pytest.raises(InputError) as caught:
        planner.plan(NET, "8xA100-80GB,8xH100-SXM")
    assert str(caught.value) == (
        f"cluster = 8xA100-80GB, 8xH100-SXM: {NET} takes one cluster at a time"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel = 2: what is inside"),
        ({"pipeline_parallel": 2}, "pipeline_parallel = 2"),
        ({"context_parallel": 2}, "context_parallel = 2"),
        ({"expert_parallel": 2}, "expert_parallel = 2"),
        ({"offload": "optimizer"}, "offload = optimizer"),
        ({"recompute": "selective"}, "must be none or full"),
        ({"recompute_layers": 2}, "recompute_layers = 2"),
        ({"lora": 8}, "lora = 8: has no meaning"),
        ({"layers": "3,3"}, "layers = 3,3: has no meaning"),
        ({"attention_kernel": "eager"}, "attention_kernel = eager"),
        ({"software": "megatron"}, "software = megatron"),
        ({"precision": "fp16"}, "precision = 'fp16'.* bf16 or fp32 or fp64"),
        ({"optimizer": "muon"}, "optimizer = 'muon'.* adamw or sgd"),
        ({"data_parallel": 4}, "data_parallel = 4, but there are 8 ranks"),
        ({"global_batch_size": 12}, "= 8, but global_batch_size is 12"),
        ({"global_batch_size": 0}, "global_batch_size = 0"),
        ({"dp_replicate": 3}, "dp_replicate = 3 does not divide"),
        ({"dp_replicate": 2, "zero_stage": 0}, "needs zero_stage >= 1"),
    ],
)
def test_bad_questions_are_one_line(traces: Traces, options: dict[str, Any], message: str) -> None:
    traces(sample())
    with pytest.raises(InputError, match=message) as caught:
        planner.fit(NET, CLUSTER, **options)
    assert "\n" not in str(caught.value)


def test_a_batch_that_ranks_do_not_divide(traces: Traces) -> None:
    traces(sample())
    with pytest.raises(InputError, match="12: 8 data ranks do not divide it"):
        planner.plan(NET, CLUSTER, global_batch_size=12)
    with pytest.raises(InputError, match="zero_stage = 1 shards over data ranks"):
        planner.plan(NET, "1xA100-80GB", fix="zero=1")


def test_without_torch_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs torch: pip install 'shardplan"):
        executor_process.trace(NET, precision="fp32", device="cpu")


MINE = """
import torch
from torch import nn

print("loading")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()

def build():
    return Net()

def broken():
    raise RuntimeError("out of ideas")

def example_inputs(batch_size):
    return {"x": torch.zeros(batch_size, 8)}
"""


@pytest.mark.slow
def test_a_module_of_the_current_folder_is_traced_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(planner.__file__).parents[1]))
    with pytest.raises(SystemExit) as ended:
        main(["fit", "module:mine:build", "8xA100-80GB", "--zero", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["model"]["parameters"] == 2 * 72
    assert [block["name"] for block in found["model"]["blocks"]] == ["layers.0", "layers.1"]
    for name, words in (
        ("module:mine:broken", "module:mine:broken: cannot be traced: RuntimeError: out of ideas"),
        ("module:yours:build", "yours cannot be imported"),
        ("module:mine:nothing", "mine has no nothing"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["fit", name, "8xA100-80GB"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.splitlines()) == 1
