"""Questions of the page: what an address may hold, and what a plan is as fields."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.plan.plan import Plan
from hardware_profiles.errors import InputError, ShardplanError
from planner.page.question import BY_NAME, FIELDS, PageQuestion, fields_of, read_question


def test_a_plan_survives_the_address() -> None:
    plan = Plan(
        data_parallel=2,
        tensor_parallel=4,
        pipeline_parallel=2,
        pipeline_schedule="interleaved_1f1b",
        virtual_stages=2,
        zero_stage=1,
        sequence_parallel=False,
        recompute="full",
        recompute_layers=3,
        micro_batch_size=2,
    )
    address = PageQuestion().address(cluster="2x8xH100-SXM", **fields_of(plan))
    given_ = read_question(address).plan
    assert {name: getattr(plan, name) for name in given_} == given_


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=gpt2&model=gpt2", "Model: given twice"),
        ("tensor=2", "no field is called 'tensor'"),
        ("tensor_parallel=2", "no field is called 'tensor_parallel'. It is tp"),
        ("model=" + "a" * 300, "Model: 300 characters are too many (at most 200)"),
        ("config=" + "a" * 32_001, "config.json: 32,001 characters are too many"),
        ("model=%ff", "the address cannot be read"),
        ("&".join(f"a{n}=1" for n in range(100)), "the address cannot be read"),
        ("a" * 100_001, "the address has 100,001 characters"),
    ],
)
def test_an_address_is_refused(query: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_question(query)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["box.toml", "sub/box.toml", "../box.toml", "here", "here:2", "."])
def test_a_cluster_is_never_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "box.toml").write_text("read = true")
    monkeypatch.chdir(tmp_path)
    for field in ("cluster", "clusters"):
        question = PageQuestion.of({field: name})
        with pytest.raises(InputError, match="cluster"):
            _ = question.clusters


@pytest.mark.parametrize("name", ["org/name", "./config.json", "llama-3-8b", "folder", "run.sh"])
def test_a_model_is_never_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("planner.request.model.read_json", lambda *_: pytest.fail("a file is read"))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    monkeypatch.setattr("planner.request.model._from_hub", _refuse)
    try:
        model = PageQuestion.of({"model": name}).model
    except InputError:
        return
    assert model.name == "llama-3-8b" == name


def _refuse(name: str) -> None:
    raise InputError(f"{name}: not on the hub")


ANY_FIELD = st.fixed_dictionaries(
    {}, optional={field.name: st.text(max_size=40) for field in FIELDS if field.name != "model"}
)


@pytest.mark.slow
@settings(deadline=None)
@given(ANY_FIELD)
def test_hostile_fields_are_values_or_one_message(fields: dict[str, str]) -> None:
    question = PageQuestion.of(fields)
    with contextlib.suppress(ShardplanError):  # no other error
        question = read_question(question.address())
        _ = question.model, question.clusters, question.workload, question.plan


def test_fields_have_arguments_that_exist() -> None:
    from planner.request.requests import FitRequest

    known = set(FitRequest.__dataclass_fields__)
    assert {field.argument for field in BY_NAME.values() if field.argument} <= known
    assert os.sep not in "".join(BY_NAME)


@pytest.mark.parametrize(("offload", "stage"), [("weights", 3), ("activations", 0)])
def test_one_rank_keeps_its_stage_where_it_offloads(offload: str, stage: int) -> None:
    asked = f"cluster=1xA100-80GB&zero=3&recompute=none&mbs=1&offload={offload}"
    assert read_question(asked).plan["zero_stage"] == stage
