"""The planner: whether a model fits a cluster, and the best plan to train it.

import planner
planner.fit("llama-3-8b", "8xA100-80GB", seq_len=8192)
planner.plan("llama-3-70b", "16x8xH100-SXM", seq_len=8192, global_batch_size=1024).table
planner.explain("plan.json", why_not="tp=16,pp=4")
planner.compare("plan.json", "other.json")
planner.compare_techniques("llama-3-8b", "2x8xA100-80GB").table
planner.report("plan.json").save("report.html")
planner.trace("plan.json").save("trace.json")  # for Perfetto
planner.calibrate("runs/first", output="cluster.toml")
planner.validate().groups
planner.learn("RUNS.csv", "my-trainer.toml")
planner.check(model, optimizer=optimizer, inputs=batch)  # a live nn.Module, nothing is run
planner.estimate_memory(model, optimizer=optimizer, inputs=batch).table
"""

from importlib import import_module
from typing import Any, Final

MODULES: Final = {  # of the public functions, whose types stand in __init__.pyi
    "check": "planner.api.check",
    "estimate_memory": "planner.api.check",
    "fit": "planner.api.fit",
    "plan": "planner.api.plan",
    "explain": "planner.explanation.explain",
    "compare": "planner.runs.compare",
    "compare_techniques": "planner.techniques.compare",
    "calibrate": "planner.runs.calibrate",
    "validate": "planner.validation.answer",
    "learn": "planner.learning.answer",
    "report": "planner.reports.report",
    "trace": "planner.reports.trace",
}
VERSION: Final = "__version__"  # of the installed distribution, which has it from pyproject.toml
__all__ = sorted(MODULES)


def __dir__() -> list[str]:
    """Return the public functions, for completion in editors and notebooks."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public function when it is used, so that the command line starts quickly."""
    if name == VERSION:
        return import_module("importlib.metadata").version("shardplan")
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    documented = import_module("planner.request.options.arguments").documented
    return documented(getattr(import_module(MODULES[name]), name))
