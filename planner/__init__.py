"""What to do: will it fit, what is the best plan.

import planner
planner.fit("llama-3-8b", "8xA100-80GB", seq_len=8192)
planner.plan("llama-3-70b", "16x8xH100-SXM", seq_len=8192, global_batch_size=1024).table
planner.explain("plan.json", why_not="tp=16,pp=4")
planner.validate().groups
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api.fit import fit as fit
    from planner.api.plan import plan as plan
    from planner.explanation.explain import explain as explain
    from planner.validation.answer import validate as validate


def __getattr__(name: str) -> Any:
    """Load the front door when it is used: the command line starts without it."""
    if name == "explain":
        from planner.explanation.explain import explain

        return explain
    if name == "validate":
        from planner.validation.answer import validate

        return validate
    if name == "fit":
        from planner.api.fit import fit

        return fit
    if name == "plan":
        from planner.api.plan import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
