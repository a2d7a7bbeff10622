"""The public functions of ``planner`` can be called again, whatever was imported in between."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.plan_file import write_plan_file
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from hardware_profiles.options import declared
from planner.request.requests import FitRequest, PlanRequest
from tests.planner.runs.recorded import plan_file, write_run
from tests.samples import LLAMA

ROOT = Path(__file__).parents[2]
CLUSTER = "2xA100-80GB"
PUBLIC = names_in("""
    calibrate check compare compare_techniques estimate_memory explain fit learn plan report trace
    validate
""")
MODEL = LLAMA | {"num_hidden_layers": 4}


def exported(path: Path) -> set[str]:
    """Names that an ``__init__.py`` defines or imports from elsewhere, for type checkers too."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    body = ast.parse(path.read_text()).body
    body += [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    names = set()
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module != package:
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


def test_dir_shows_the_public_functions_alone() -> None:
    assert dir(planner) == sorted(PUBLIC) == sorted(planner.__all__)


@pytest.mark.parametrize(
    ("function", "request_class"), [(planner.fit, FitRequest), (planner.plan, PlanRequest)]
)
def test_signatures_show_every_option(function: Any, request_class: type) -> None:
    shown = inspect.signature(function).parameters
    options = {name for name, one in declared(request_class).items() if one.option is not None}
    assert set(shown) == options
    kinds = {name: parameter.kind for name, parameter in shown.items()}
    assert [name for name, kind in kinds.items() if kind != inspect.Parameter.KEYWORD_ONLY] == [
        "model",
        "cluster",
    ]
    assert shown["seq_len"].annotation == int | str | None
    assert "\n    seq_len: tokens of a sequence" in function.__doc__


def test_the_stub_declares_what_the_functions_take() -> None:
    tree = ast.parse((ROOT / "planner" / "__init__.pyi").read_text())
    stubs = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(stubs) == {"fit", "plan"}
    for name, node in stubs.items():
        names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
        assert names == list(inspect.signature(getattr(planner, name)).parameters)
    assert exported(ROOT / "planner" / "__init__.pyi") >= set(PUBLIC)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 8}, "unknown option 'dp'. It is data_parallel (on the command line --dp)"),
        ({"mbs": 8}, "It is micro_batch_size (on the command line --micro-batch-size)"),
        ({"seqlen": 4096}, "unknown option 'seqlen'. Did you mean seq_len or target_seq_len?"),
        ({"sequence_length": 4096}, "Did you mean seq_len?"),
        ({"gradient_checkpointing": True}, "Did you mean recompute='full'?"),
        ({"quite_different": 1}, "Known: model, cluster, power, global_batch_size"),
        ({"model": "gpt2"}, "fit: multiple values for argument 'model'; see help(planner.fit)"),
    ],
)
def test_an_unknown_option_of_fit_names_the_right_one(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        planner.fit("gpt2", "8xA100-80GB", **arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_function_suggests_the_name_of_an_argument(name: str) -> None:
    function = getattr(planner, name)
    known = list(inspect.signature(function).parameters)
    for right in known:
        wrong = right + "s" if right + "s" not in known else right + "x"
        with pytest.raises(InputError) as raised:
            function(**{wrong: 1})
        assert f"{name}: unknown option {wrong!r}. Did you mean" in str(raised.value)
        assert right in str(raised.value)
    with pytest.raises(InputError) as raised:
        function(zzzzzz=1)
    assert str(raised.value).endswith(f"Known: {', '.join(known)}")
    with pytest.raises(InputError, match=rf"{name}: .*; see help\(planner.{name}\)"):
        function(*range(20))


DOCUMENTED = re.compile(r"^from (executor[\w.]*) import (.+)$", re.M)


def documented() -> list[tuple[str, str]]:
    """Functions and classes of the executor that the documentation calls."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    found = [(module, names) for text in texts for module, names in DOCUMENTED.findall(text)]
    return [(module, name) for module, names in found for name in names.split(", ")]


@pytest.mark.parametrize(("module", "name"), documented())
def test_the_documented_functions_of_the_executor_do_so_too(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    known = list(inspect.signature(function).parameters)
    with pytest.raises(InputError) as raised:
        function(**{known[0] + "s": 1})
    assert f"{name}: unknown option {known[0] + 's'!r}. Did you mean" in str(raised.value)
    with pytest.raises(InputError) as raised:
        function(*range(20))
    assert f"see help({module}.{name})" in str(raised.value)


def test_plan_says_how_a_part_of_the_plan_is_pinned() -> None:
    for name in ("tp", "tensor_parallel"):
        with pytest.raises(InputError, match=r'It is a part of the plan: pin it with fix="tp=…"'):
            planner.plan("gpt2", "8xA100-80GB", **{name: 2})
    with pytest.raises(InputError, match="plan: missing a required argument: 'cluster'"):
        planner.plan("gpt2")


def test_no_public_name_is_also_a_module() -> None:
    shared = []
    for package in ("hardware_profiles", "cost_models", "planner", "executor"):
        for path in (ROOT / package).rglob("__init__.py"):
            modules = {module.name for module in pkgutil.iter_modules([str(path.parent)])}
            shared += [f"{path.parent.name}.{name}" for name in exported(path) & modules]
    assert shared == []


@pytest.mark.slow
def test_every_public_function_works_twice(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text("model,gpu,num_gpus,seq_len,step_time_s\ngpt2,A100-SXM,8,1024,1.0\n")
    file = tmp_path / "plan.json"
    measured = parse_cluster(CLUSTER)
    run = write_run(tmp_path / "run", plan_file(measured), measured, device="cuda")
    texts = []
    for _ in range(2):
        fit = planner.fit(MODEL, CLUSTER, seq_len=256)
        plan = planner.plan(MODEL, CLUSTER, seq_len=256, global_batch_size=4)
        write_plan_file(file, plan.plan_file(), force=True)
        explanation = planner.explain(file)
        comparison = planner.compare(file, str(file))
        calibration = planner.calibrate(run, output=str(tmp_path / "cluster.toml"), force=True)
        validation = planner.validate(runs)
        assert validation.summary["priced"] == 1
        answers = (fit, plan.best, explanation, comparison, calibration, validation)
        texts.append([str(answer) for answer in answers])
        for module in pkgutil.walk_packages(planner.__path__, "planner."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    assert texts[0] == texts[1]
