import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost_models.legality.rules import require_legal
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.recomputed_layers import RecomputedLayers
from cost_models.plan.plan import Plan
from cost_models.plan_file import SCHEMA_VERSION, PlanFile, read_plan_file, write_plan_file
from cost_models.pricing.prediction import predict, scenario_of
from hardware_profiles.errors import InputError
from tests.samples import legal_table, make_scenario


def contents(**changes: Any) -> PlanFile:
    scenario = make_scenario("llama", "8xA100-80GB")
    plan = Plan(data_parallel=4, pipeline_parallel=2, zero_stage=1, num_microbatches=4)
    return replace(
        PlanFile(
            model=scenario.model,
            cluster=scenario.cluster,
            workload=scenario.workload,
            plan=plan,
            layer_ranges=default_layer_ranges(scenario, plan),
            prediction={"memory": {"peak_bytes": 1.5e9}, "time": {"step_seconds": 0.25}},
            created_by="shardplan test",
        ),
        **changes,
    )


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan_file(path, contents())
    again = read_plan_file(path)
    assert again == contents()
    assert dict(again.model.config) == dict(contents().model.config)
    assert again.model.num_parameters == contents().model.num_parameters
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]  # no temporary file is left


def test_every_kind_of_plan_survives(tmp_path: Path) -> None:
    scenario, table = legal_table(("llama", "8xA100-80GB", 256, 16, "shardplan", "flash"))
    for row in range(0, len(table), 61):
        plan = table.plan(row)
        written = contents(plan=plan, layer_ranges=default_layer_ranges(scenario, plan))
        write_plan_file(tmp_path / "plan.json", written, force=True)
        assert read_plan_file(tmp_path / "plan.json") == written


def test_a_target_length_is_kept_and_missing_in_older_files(tmp_path: Path) -> None:
    scenario = make_scenario("t5", "8xA100-80GB", target_seq_len=114)
    plan = Plan(data_parallel=8, micro_batch_size=2)
    ranges = default_layer_ranges(scenario, plan)
    same = {"model": scenario.model, "workload": scenario.workload, "plan": plan}
    path = tmp_path / "plan.json"
    write_plan_file(path, contents(**same, layer_ranges=ranges))
    assert read_plan_file(path).workload.target_seq_len == 114
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["workload"]["target_seq_len"]
    path.write_text(json.dumps(values), encoding="utf-8")
    assert read_plan_file(path).workload.target_seq_len == 0
    other = contents()
    workload = replace(other.workload, target_seq_len=114)
    write_plan_file(path, replace(other, workload=workload), force=True)
    with pytest.raises(InputError, match=r"workload: target_seq_len = 114: .* has no encoder"):
        read_plan_file(path)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        write_plan_file(path, contents())
    assert path.read_text() == "mine"
    write_plan_file(path, contents(), force=True)
    assert read_plan_file(path) == contents()


def test_the_order_of_ranks_is_kept_and_priced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    usual = contents()
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    ordered = replace(usual, cluster=replace(usual.cluster, rank_order=order))
    write_plan_file(path, ordered)
    assert read_plan_file(path) == ordered
    assert json.loads(path.read_text())["rank_order"] == list(order)
    assert "rank_order" not in usual.to_dict()


def test_a_folder_is_never_written_over(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        write_plan_file(tmp_path, contents(), force=True)


def test_a_missing_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_plan_file(tmp_path / "nowhere" / "plan.json", contents())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_an_input_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written"):
        write_plan_file(tmp_path / "plan.json", contents())


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_plan_file(tmp_path / "plan.json", contents(prediction={"x": float("nan")}))
    assert not (tmp_path / "plan.json").exists()


# --- edited by hand -------------------------------------------------------------------------------

Document = dict[str, Any]


def put(*path: Any, value: Any) -> Callable[[Document], None]:
    def edit(document: Document) -> None:
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return edit


def drop(*path: Any) -> Callable[[Document], None]:
    def edit(document: Document) -> None:
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return edit


RANGES = "layer_ranges"
BY_STAGE = "stage_recompute_layers"
EDITS: dict[str, tuple[Callable[[Document], None], list[str]]] = {
    "text for a count": (
        put("plan", "data_parallel", value="4"),
        ['plan: data_parallel = "4"', "whole number"],
    ),
    "a fraction": (put("plan", "tensor_parallel", value=1.5), ["tensor_parallel = 1.5"]),
    "nothing": (put("plan", "tensor_parallel", value=0), ["tensor_parallel = 0", "from 1"]),
    "negative": (put("workload", "seq_len", value=-8), ["workload: seq_len = -8"]),
    "huge": (put("workload", "seq_len", value=10**40), ["seq_len = 1", "100,000,000"]),
    "not a number": (put("workload", "seq_len", value=float("nan")), ["NaN is not"]),
    "infinite": (put("workload", "seq_len", value=float("inf")), ["Infinity is not"]),
    "a list for an object": (put("plan", value=[1]), ["plan = [1]", "object with keys"]),
    "null for an object": (put("cluster", value=None), ["cluster is missing"]),
    "unknown part of the plan": (
        put("plan", "tensor_paralel", value=2),
        ["unknown key 'tensor_paralel'", "Did you mean tensor_parallel"],
    ),
    "unknown key": (put("workloads", value={}), ["unknown key 'workloads'", "workload?"]),
    "no workload": (drop("workload"), ["workload is missing"]),
    "no layers": (drop(RANGES), ["layer_ranges is missing"]),
    "another schema": (put("schema_version", value=SCHEMA_VERSION + 1), ["schema_version = 2"]),
    "no schema": (drop("schema_version"), ["schema_version is missing"]),
    "a gap": (put(RANGES, value=[[0, 3], [4, 8]]), ["layer_ranges", "cover the layers 0 to 8"]),
    "an overlap": (put(RANGES, value=[[0, 5], [4, 8]]), ["layer_ranges"]),
    "a stage of less": (put(RANGES, value=[[0, 8], [8, 7]]), ["layer_ranges", "2 pairs"]),
    "too few layers": (put(RANGES, value=[[0, 4], [4, 7]]), ["layer_ranges"]),
    "too many stages": (put(RANGES, value=[[0, 4], [4, 6], [6, 8]]), ["layer_ranges"]),
    "true for a layer": (put(RANGES, value=[[False, 4], [4, 8]]), ["layer_ranges"]),
    "text for a layer": (put(RANGES, value=[["0", 4], [4, 8]]), ["layer_ranges"]),
    "not even pairs": (put(RANGES, value=[0, 8]), ["layer_ranges"]),
    "not a list": (put(RANGES, value="0-8"), ["layer_ranges"]),
    "more recomputed layers than a stage has": (
        lambda document: (
            put(RANGES, value=[[0, 2], [2, 8]])(document),
            put("plan", "recompute", value="full")(document),
            put("plan", "recompute_layers", value=3)(document),
        )[0],
        ["recompute_layers = 3", "smallest stage in layer_ranges has 2 layers"],
    ),
    "another number of stages": (
        put(BY_STAGE, value=[2, 1, 0]),
        ["stage_recompute_layers = 2,1,0", "3 numbers for 2 stages"],
    ),
    "more of a stage than it has": (
        put(BY_STAGE, value=[2, 5]),
        ["stage_recompute_layers = 2,5", "stage 1 has 4 layers (must be 0 to 4)"],
    ),
    "nothing of any stage": (put(BY_STAGE, value=[0, 0]), ["[0, 0]", "not all 0"]),
    "half a layer": (put(BY_STAGE, value=[1.5, 0]), ["stage_recompute_layers = [1.5, 0]"]),
    "layers as text": (put(BY_STAGE, value="2,1"), ["stage_recompute_layers = 2,1 (must be"]),
    "an order of too few ranks": (
        put("rank_order", value=[0, 1, 2]),
        ["rank_order = [0, 1, 2]", "every accelerator from 0 to"],
    ),
    "an accelerator twice": (put("rank_order", value=[0, *range(15)]), ["rank_order", "once"]),
    "rank 0 elsewhere": (
        put("rank_order", value=[*range(1, 16), 0]),
        ["rank_order", "0 the first"],
    ),
    "an order as text": (put("rank_order", value="0123"), ["rank_order", "a list"]),
    "another batch": (
        put("workload", "global_batch_size", value=17),
        ["micro_batch_size 1 x num_microbatches 4 x data_parallel 4 = 16", "17", "must be equal"],
    ),
    "a broken model": (
        put("model", "config", "hidden_size", value=-4096),
        ["model: config", "hidden_size = -4096"],
    ),
    "an unknown family": (put("model", "config", "model_type", value="lama"), ["llama"]),
    "a broken cluster": (put("cluster", "num_nodes", value=0), ["cluster: num_nodes = 0"]),
    "a schedule": (
        put("plan", "pipeline_schedule", value="1F1B"),
        ["pipeline_schedule", "1f1b"],
    ),
    "a nest": (put("prediction", value=json.loads("[" * 40 + "]" * 40)), ["too deeply"]),
    "prediction as text": (put("prediction", value="fast"), ["prediction"]),
}


def test_stages_of_embedding_or_head_alone_are_read(tmp_path: Path) -> None:
    three = replace(contents().plan, pipeline_parallel=3)
    ranges = {"alone": ((0, 0), (0, 8), (8, 8)), "refused": ((0, 4), (4, 4), (4, 8))}
    for name, pairs in ranges.items():
        file = contents(plan=three, layer_ranges=pairs).to_dict()
        (tmp_path / name).write_text(json.dumps(file))
    assert read_plan_file(tmp_path / "alone").layer_ranges == ranges["alone"]
    with pytest.raises(InputError, match="layer_ranges"):
        read_plan_file(tmp_path / "refused")


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_cannot_be_is_one_clear_line(name: str, tmp_path: Path) -> None:
    edit, words = EDITS[name]
    document = json.loads(json.dumps(contents().to_dict()))
    edit(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        read_plan_file(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 600
    for word in words:
        assert word in message


def test_the_layers_of_each_stage_that_are_recomputed_are_written_and_read(tmp_path: Path) -> None:
    document = contents().to_dict()
    assert BY_STAGE not in document
    put(BY_STAGE, value=[2, 0])(document)
    put("plan", "recompute", value="full")(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    read = read_plan_file(path)
    assert read.stage_recompute_layers == (2, 0)
    assert read.recomputed == RecomputedLayers(by_stage=(2, 0))
    assert read.to_dict() == document
    require_legal(scenario_of(read), read.plan)
    recompute = predict(scenario_of(read), read.plan, read.layer_ranges).time.parts.recompute
    assert recompute > 0


def test_an_edit_that_can_be_is_taken(tmp_path: Path) -> None:
    document = contents().to_dict()
    put(RANGES, value=[[0, 3], [3, 8]])(document)
    drop("prediction")(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    read = read_plan_file(path)
    assert read.layer_ranges == ((0, 3), (3, 8))
    assert read.prediction == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("not json", "not JSON"),
        ("[]", "a JSON object is expected, got list"),
        ("3", "got int"),
        ("null", "got NoneType"),
        ("{}", "schema_version is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema_version": ' + "9" * 5000 + "}", ""),
        (" " * 5_000_000, "too large"),
        ('{"a": 1}\x00', "not JSON"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_not_a_plan_is_one_clear_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_plan_file(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bytes_folders_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "binary", "not text"),
        (tmp_path, "is a folder"),
        (tmp_path / "none", "no such file"),
        (Path("a\x00b"), "not a usable path|no such file"),
    ):
        with pytest.raises(InputError, match=said):
            read_plan_file(path)
