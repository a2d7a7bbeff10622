"""The public functions of ``planner`` can be called again, whatever was imported in between."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import planner
from cost_models.plan_file import write_plan_file
from hardware_profiles.cluster.parse import parse_cluster
from tests.planner.runs.recorded import plan_file, write_run

ROOT = Path(__file__).parents[2]
CLUSTER = "2xA100-80GB"
PUBLIC = ("calibrate", "compare", "explain", "fit", "plan", "validate")
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


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


def test_these_are_the_public_functions() -> None:
    names = exported(ROOT / "planner" / "__init__.py") - {
        "TYPE_CHECKING",
        "Any",
        "Final",
        "__getattr__",
        "import_module",
    }
    assert names == set(PUBLIC)


def test_no_public_name_is_also_a_module() -> None:
    shared = []
    for package in ("hardware_profiles", "cost_models", "planner", "executor"):
        for path in (ROOT / package).rglob("__init__.py"):
            modules = {module.name for module in pkgutil.iter_modules([str(path.parent)])}
            shared += [f"{path.parent.name}.{name}" for name in exported(path) & modules]
    assert shared == []


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
