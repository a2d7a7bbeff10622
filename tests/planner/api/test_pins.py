"""Random questions through ``planner.plan`` and ``planner.fit``, as a user asks them.

No pinned option gives a better answer than the question without it, and no plan that ``fit``
accepts is better than what ``plan`` finds, free or with options of that plan pinned. Plans are
drawn from the fields of ``Plan``; models, clusters (trees of links, too), memory, precision and
trainers at random.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.refinement.placement import GAIN
from tests.planner.refinement.test_plans_and_orders import slow_tree
from tests.planner.search.test_exact_search import with_share
from tests.planner.search.test_nothing_left_out import PINNED, draw_plan
from tests.samples import make_scenario, sample_model

DRAWN = 12  # plans of a question, most of which are illegal
MODELS: dict[str, dict[str, list[Any]]] = {
    "llama": {
        "num_hidden_layers": [4, 7, 9, 12],
        "hidden_size": [512, 1024, 2048],
        "vocab_size": [512, 32_000, 128_000],
        "max_position_embeddings": [32_768],
    },
    "mixtral": {
        "num_hidden_layers": [4, 7],
        "hidden_size": [512, 1024],
        "max_position_embeddings": [32_768],
    },
    "t5": {"num_layers": [2, 3, 4]},
}
CLUSTERS = ("4x{}", "6x{}", "8x{}", "2x4x{}", "3x2x{}")
CHIPS = ("A100-80GB", "A100-40GB", "H100-SXM")
TRAINERS = (
    *("shardplan", "shardplan", "megatron-core", "nemo", "torchtitan", "deepspeed"),
    *("hf-trainer", "torchtune", "nanotron", "megatron-2021"),
)
Answer = tuple[bool, float]  # whether it does not fit with its whole interval, seconds of a step


class Question:
    """A model, a cluster and options."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        name = self.one_of(list(MODELS))
        self.model: ModelSpec = sample_model(
            name, **{field: self.one_of(values) for field, values in MODELS[name].items()}
        )
        lengths = [256, 1024, 8192] if name != "t5" else [256, 512]
        self.options: dict[str, Any] = {
            "seq_len": self.one_of(lengths),
            "global_batch_size": self.one_of([8, 12, 24, 48]),
            "software": self.one_of(TRAINERS),
            "precision": self.one_of(["bf16", "bf16", "fp16", "fp8"]),
        }
        cluster = parse_cluster(self.one_of(CLUSTERS).format(self.one_of(CHIPS)))
        if self.rng.random() < 0.2:
            cluster = slow_tree(self.rng, 4)
        share = self.one_of([1.0, 1.0, 0.3, 0.12, 0.08, 0.05])
        scenario = replace(
            make_scenario(
                self.model,
                seq_len=self.options["seq_len"],
                global_batch_size=self.options["global_batch_size"],
            ),
            cluster=cluster,
        )
        self.scenario = with_share(scenario, share)

    @property
    def cluster(self) -> Cluster:
        return self.scenario.cluster

    def one_of(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def plan(self, pins: dict[str, Any] | None = None) -> Answer:
        """Ask for the best plan: with its own stages or order of ranks, too."""
        try:
            found: Any = planner.plan(self.model, self.cluster, fix=pins, **self.options)
        except NoLegalPlanError:
            return True, np.inf
        return not found.ranked[0].fits, min(one.step.seconds for one in found.ranked)

    def fit(self, plan: Plan) -> Answer | None:
        """Ask whether a plan fits; None: it is refused, or does not."""
        parts = {name: value for name, value in plan.to_dict().items() if name != "recompute_every"}
        try:
            found: Any = planner.fit(self.model, self.cluster, **self.options, **parts)
        except InputError:
            return None
        if found.verdict == "does_not_fit":
            return None
        return not found.assessment.fits, found.assessment.time.step_seconds


def no_better(one: Answer, than: Answer) -> bool:
    """Own stages and orders are shown where they gain more than GAIN each."""
    return one[0] > than[0] or (one[0] == than[0] and one[1] >= than[1] * (1.0 - 2.1 * GAIN))


def check(seed: int) -> None:
    question = Question(seed)
    try:
        free = question.plan()
    except InputError:
        return  # the trainer or the accelerator has no such precision
    rng = question.rng
    for _ in range(DRAWN):
        plan = draw_plan(rng, question.scenario)
        answer = question.fit(plan)
        if answer is None:
            continue
        names = [name for name in PINNED if rng.random() < 0.4]
        pins = {name: getattr(plan, name) for name in names}
        pinned = question.plan(pins)
        assert no_better(answer, free), (plan, answer, free)
        assert no_better(answer, pinned), (plan, pins, answer, pinned)
        assert no_better(pinned, free), (pins, pinned, free)
        return


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_pins_never_improve_an_answer_and_fit_accepts_nothing_better(seed: int) -> None:
    check(seed)
