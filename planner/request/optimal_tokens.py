"""``--compute-optimal``: the tokens of a whole run by the size of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from cost_models.compute.training_run import compute_optimal_tokens
from cost_models.model.parameters import active_parameters
from hardware_profiles.errors import InputError
from planner.request.executor_process import is_module
from planner.request.model import model_of
from planner.request.requests import FitRequest, PlanRequest

Request = TypeVar("Request", FitRequest, PlanRequest)
OF_OTHER_QUESTIONS = ("largest-model", "most-tokens")


def with_optimal_tokens(request: Request) -> Request:
    """Return a request of ``--compute-optimal`` with its tokens; any other one as it is."""
    if not request.compute_optimal or is_module(request.model):
        return request
    if request.tokens is not None:
        raise InputError(
            f"--compute-optimal and --tokens {request.tokens}: choose one of them "
            "(--compute-optimal is --tokens of 20 for each parameter)"
        )
    find = getattr(request, "find", None)
    if find in OF_OTHER_QUESTIONS:
        raise InputError(f"--compute-optimal: not with --find {find}, which has no one number")
    parameters = active_parameters(model_of(request.model))
    tokens = f"{float(compute_optimal_tokens(parameters)):.0f}"
    return replace(request, tokens=tokens, compute_optimal=None)
