"""Whatever is typed or read, the command line ends with an exit code that means something.

Never a traceback, never code 1 (our bug), one JSON document or nothing on stdout.
"""

import contextlib
import copy
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile, read_plan_file
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.cli import app as cli
from planner.request.pins import SHORT_NAMES
from tests.samples import CONFIGS, LLAMA, examples, make_scenario

ALLOWED = {0, 2, 3, 4}
FEW = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
FEWER = settings(FEW, max_examples=examples(25))  # where the slow tests try hundreds
MANY = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, 2**31, 2**63, 10**18, 1e308, "nan", "\x00", "\ud800", "🦙", "../x"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(words))
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def assert_well_behaved(*words: str) -> None:
    code, out, err = run(*words)
    assert code in ALLOWED, (code, words, err)
    assert "Traceback" not in out + err
    if code == 2:
        assert out == ""
        assert 0 < len(err) < 3000
    elif "--json" in words and out:
        json.loads(out)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths_of(inner, (*path, key))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            found += paths_of(inner, (*path, index))
    return found


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any]) -> str:
    """A document with some values exchanged, dropped or added; its text cut now and then."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(document)))
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        action = draw(st.sampled_from(["set", "set", "set", "drop", "add"]))
        if action == "set":
            inner[path[-1]] = draw(JSON)
        elif action == "drop":
            del inner[path[-1]]
        elif isinstance(inner, dict):
            inner[draw(st.text(max_size=6))] = draw(JSON)
        if not paths_of(document):
            break
    text = json.dumps(document)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


CONFIG_TEXTS = (
    st.sampled_from(sorted(CONFIGS)).flatmap(lambda name: mutated(CONFIGS[name]))
    | JSON.map(json.dumps)
    | st.text(max_size=40)
)
WORDS = st.sampled_from(
    ["8", "x", "A100", "-80GB", "H100-SXM", "DGX-", "2x", "nvl72", "gb200", ".toml", " ", "", "0",
     "-", "99999999", "p5.48xlarge", "A10O", "🦙", "\x00", "\n", "1e3", "MI300X", "x8x", "$(ls)"]
)  # fmt: skip
CLUSTER_TEXTS = (st.lists(WORDS, max_size=5).map("".join) | st.text(max_size=20)).filter(
    lambda text: "here" not in text.lower()
)
FIX_TEXTS = st.lists(
    st.builds(
        "{}{}{}".format,
        st.sampled_from([*SHORT_NAMES, "tensor_parallel", "x", ""]),
        st.sampled_from(["=", "==", "", " = "]),
        st.integers(-2, 20).map(str)
        | st.sampled_from(["on", "full", "gpipe", "1f1b", "interleaved_1f1b", "none", "", "9" * 40])
        | st.text(max_size=4),
    ),
    max_size=4,
).map(",".join)


def check_config(folder: Path, text: str) -> None:
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    assert_well_behaved("fit", str(path), "4xA100-80GB", "--json", "--seq-len", "64")


def check_cluster(text: str) -> None:
    assert_well_behaved("fit", "smollm2-135m", "--seq-len", "64", "--json", "--", text)


def check_fix(text: str) -> None:
    assert_well_behaved(
        "plan", "smollm2-135m", "4xA100-80GB", "--seq-len", "64", "--json", "--top", "1",
        f"--fix={text}",
    )  # fmt: skip


REQUIRE_TEXTS = st.lists(
    st.builds(
        "{}{}{}".format,
        st.sampled_from([*SHORT_NAMES, "memory", "step", "mfu", "gpus", "recompute", "x", ""]),
        st.sampled_from(["<=", ">=", "<", ">", "==", "!=", "=", "", " <= "]),
        st.integers(-2, 20).map(str)
        | st.sampled_from(["on", "full", "1f1b", "4GiB", "10s", "40%", "", "9" * 40, "1e400"])
        | st.text(max_size=4),
    ),
    max_size=3,
).map(" and ".join)
CLUSTER_LISTS = st.lists(
    st.sampled_from(["2xL40S", "1..2xL40S", "3..1xL40S", "1..", "..", "", "x", "16xL40S"]),
    max_size=2,
).map(",".join)
AMOUNTS = st.integers(-1, 10**7).map(str) | st.sampled_from(["1B", "1e99", "-", "$5", "L40S=1"])


def check_question(require: str, clusters: str, options: dict[str, str]) -> None:
    words = [f"{name}={value}" for name, value in options.items()]
    assert_well_behaved(
        "plan", "smollm2-135m", clusters, "--seq-len", "64", "--global-batch-size", "4", "--json",
        "--top", "1", "--fix", "pp=1", f"--require={require}", *words,
    )  # fmt: skip


@cache
def plan_document() -> dict[str, Any]:
    scenario = make_scenario("llama", "2x4xH100-SXM")
    plan = Plan(data_parallel=4, pipeline_parallel=2, zero_stage=1, num_microbatches=4)
    contents = PlanFile(
        scenario.model,
        scenario.cluster,
        scenario.workload,
        plan,
        default_layer_ranges(scenario, plan),
    )
    return json.loads(json.dumps(contents.to_dict()))  # type: ignore[no-any-return]


def check_plan_file(folder: Path, text: str) -> None:
    path = folder / "plan.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    said = ""
    try:
        read = read_plan_file(path)
    except InputError as error:
        said = str(error)
    if said:
        assert "\n" not in said
        assert len(said) < 3000
        return
    assert len(read.layer_ranges) == read.plan.num_stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FEWER
@given(text=CONFIG_TEXTS)
def test_configs(folder: Path, text: str) -> None:
    check_config(folder, text)


@FEWER
@given(text=CLUSTER_TEXTS)
def test_clusters(text: str) -> None:
    check_cluster(text)


@FEWER
@given(text=FIX_TEXTS)
def test_fixes(text: str) -> None:
    check_fix(text)


@FEW
@given(text=REQUIRE_TEXTS)
def test_requirements(text: str) -> None:
    check_question(text, "2xL40S", {})


QUESTIONS = st.fixed_dictionaries(
    {},
    optional={
        "--price": AMOUNTS,
        "--budget": AMOUNTS,
        "--tokens": AMOUNTS,
        "--days": AMOUNTS,
        "--gpus-at-most": st.integers(-1, 3).map(str),
        "--precision": st.sampled_from(["bf16,fp8", "bf16", "fp9", ","]),
        "--objective": st.sampled_from(["time", "cost", "memory", "energy", "x"]),
        "--pareto": st.sampled_from(["time,memory", "cost,energy", "time", "x,y"]),
        "--allow": st.sampled_from(["offload", "offload=weights", "x"]),
    },
)


@settings(FEW, max_examples=examples(25))
@given(clusters=CLUSTER_LISTS, options=QUESTIONS)
def test_questions(clusters: str, options: dict[str, str]) -> None:
    check_question("", clusters, options)


@settings(FEW, max_examples=examples(200))
@given(data=st.data())
def test_plan_files(folder: Path, data: st.DataObject) -> None:
    check_plan_file(folder, data.draw(mutated(plan_document())))


@FEW
@given(
    st.fixed_dictionaries(
        {},
        optional={
            option: st.integers(-3, 40).map(str) | st.text(max_size=3)
            for option in names_in("""
                --seq-len --micro-batch-size --global-batch-size --dp --tp --pp --virtual-stages
                --zero --num-microbatches
            """)
        }
        | {
            "--recompute": st.sampled_from(["none", "selective", "full", "x"]),
            "--schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", ""]),
            "--precision": st.sampled_from(["bf16", "fp16", "fp32", "fp64", "fp8"]),
            "--software": st.sampled_from(["shardplan", "megatron", "../x"]),
        },
    )
)
def test_options(options: dict[str, str]) -> None:
    words = [f"{name}={value}" for name, value in options.items()]
    assert_well_behaved("fit", "smollm2-135m", "8xA100-80GB", "--json", *words)


@pytest.mark.slow
@MANY
@given(text=CONFIG_TEXTS)
def test_hundreds_of_configs(folder: Path, text: str) -> None:
    check_config(folder, text)


@pytest.mark.slow
@MANY
@given(text=CLUSTER_TEXTS)
def test_hundreds_of_clusters(text: str) -> None:
    check_cluster(text)


@pytest.mark.slow
@MANY
@given(text=FIX_TEXTS)
def test_hundreds_of_fixes(text: str) -> None:
    check_fix(text)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_hundreds_of_plan_files(folder: Path, data: st.DataObject) -> None:
    check_plan_file(folder, data.draw(mutated(plan_document())))


@pytest.mark.slow
def test_the_untouched_documents_are_fine(folder: Path) -> None:
    """What is mutated must be good before, or nothing is tested."""
    check_plan_file(folder, json.dumps(plan_document()))
    assert read_plan_file(folder / "plan.json").plan.data_parallel == 4
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert run("fit", str(folder / "config.json"), "4xA100-80GB")[0] == 0
