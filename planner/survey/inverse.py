"""Inverse questions: fewest accelerators, largest micro-batch, longest sequence, largest model.

Every answer is verified by the forward direction: the answer has a plan that fits (it is given),
and the next candidate was searched and has none. What is monotone is bisected, the rest is tried
one by one:

    fewest-gpus           tried from the smallest on (whether a plan exists may come and go with the
                          number: batches and heads have to divide)
    largest-micro-batch   of a given batch its divisors, from the largest on; without one, bisected:
                          with one micro-batch for each accelerator the same layouts are legal for
                          every size, and the peak of each grows with it
    longest-sequence      bisected in steps of lcm(128, 2 x accelerators) tokens, at which every
                          layout that is legal for a length is legal for all longer ones, and its
                          peak grows
    largest-model         tried from the largest on
    cheapest-cluster      all are searched; fewest dollars a token
    most-tokens           all are searched; most tokens for --budget and --days
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cost_models.model.spec import ModelSpec
from cost_models.plan_file import PlanFile
from cost_models.units import format_count
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.assessment.reach import fits, largest, with_seq_len
from planner.request.clusters import part_of
from planner.request.constraints import Constraint
from planner.request.divisors import divisors
from planner.request.resolve import ModelLike, model_of
from planner.request.scenario import MAX_BATCH, MAX_SEQ_LEN, AssumedScenario
from planner.survey.answer import SurveyAnswer, assumptions_of, nothing_found
from planner.survey.cases import WorkloadRequest
from planner.survey.compare_cases import RankedPlan, SurveyCase, SurveyRequest, ranked, survey
from planner.survey.text import inverse_text

FINDS: Final = (
    "fewest-gpus",
    "cheapest-cluster",
    "largest-micro-batch",
    "longest-sequence",
    "largest-model",
    "most-tokens",
)
COARSEST: Final = 4096  # tokens of a step in which sequences are tried
FINEST: Final = 128
MOST_MODELS: Final = 64


@dataclass(frozen=True, slots=True)
class Attempt:
    """One candidate of an inverse question: what the forward search said."""

    value: Any  # accelerators, sequences, tokens, or a model's name
    words: str
    cases: tuple[SurveyCase, ...]

    @property
    def fits(self) -> bool:
        """Whether some plan fits with its whole interval."""
        return any(found.fits for case in self.cases for found in case.found)


@dataclass(frozen=True, slots=True, repr=False)
class InverseAnswer:
    """The answer to an inverse question, with the forward answers on both sides of it."""

    find: str
    value: Any
    words: str
    tried: tuple[Attempt, ...]  # in the order of asking
    beyond: Attempt | None  # the next candidate, shown to have no plan; None: there is none
    answer: SurveyAnswer  # of the value

    @property
    def best(self) -> Any:
        """The best plan at the answer."""
        return self.answer.best

    @property
    def scenario(self) -> Any:
        """The scenario of that plan."""
        return self.answer.scenario

    def plan_file(self, rank: int = 0) -> PlanFile:
        """Return the contents of a plan.json for the plan of that rank (0: the best)."""
        return self.answer.plan_file(rank)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            **self.answer.to_dict(),
            "find": self.find,
            "value": self.value,
            "answer": self.words,
            "tried": [{"value": one.value, "fits": one.fits} for one in self.tried],
            "next": None
            if self.beyond is None
            else {"value": self.beyond.value, "fits": self.beyond.fits},
        }

    def __str__(self) -> str:
        beyond = None if self.beyond is None else (self.beyond.words, self.beyond.cases)
        return inverse_text(
            self.find, self.words, beyond, tried=bool(self.tried), answer=str(self.answer)
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def models_of(model: ModelLike, find: str | None) -> list[ModelLike]:
    """Return the models that are named: several with commas, of ``largest-model`` alone."""
    if not isinstance(model, str) or "," not in model:
        return [model]
    names = [name.strip() for name in model.split(",")]
    if find != "largest-model":
        raise InputError(f"{model[:60]}: several models belong to --find largest-model")
    if not all(names) or len(names) > MOST_MODELS:
        raise InputError(f"{model[:60]}: must be 1 to {MOST_MODELS} models with commas between")
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class _Inverse:
    """What all inverse questions need."""

    find: str
    job: WorkloadRequest
    clusters: list[Cluster]
    precisions: list[str | None]
    asked: SurveyRequest

    @property
    def largest(self) -> int:
        """Accelerators of the largest cluster: the default batch has a micro-batch for each."""
        return max(cluster.num_gpus for cluster in self.clusters)

    def ask(
        self, value: Any, words: str, scenarios: Sequence[AssumedScenario], **changes: Any
    ) -> Attempt:
        """Search forward for one candidate."""
        asked = replace(self.asked, offload_if_needed=False, **changes)
        return Attempt(value, words, tuple(survey(scenarios, asked)))

    def scenarios(
        self, clusters: Sequence[Cluster] | None = None, **changes: Any
    ) -> list[AssumedScenario]:
        """Return the cases of one candidate."""
        job = replace(self.job, options={**self.job.options, **changes})
        chosen = self.clusters if clusters is None else clusters
        batch = self.largest if len(self.clusters) > 1 or clusters is not None else None
        return [
            job.scenario(cluster, batch, precision=precision)
            for cluster in chosen
            for precision in self.precisions
        ]

    def answer(
        self, tried: Sequence[Attempt], found: Attempt, beyond: Attempt | None, **changes: Any
    ) -> InverseAnswer:
        """Put the answer together."""
        asked = replace(self.asked, **changes)
        cases = found.cases
        best = tuple(ranked(cases, asked))
        assumptions = tuple(assumptions_of(cases, best, asked))
        survey_answer = SurveyAnswer(asked, cases, best, assumptions)
        return InverseAnswer(
            self.find, found.value, found.words, tuple(tried), beyond, survey_answer
        )

    def nothing(self, tried: Sequence[Attempt]) -> NoLegalPlanError:
        """Return the refusal where no candidate has a plan that fits."""
        cases, why = tried[-1].cases, f"--find {self.find}: not even {tried[-1].words}"
        # of sizes that are looked for the smallest was asked: no change of the rest is told
        helped = self.find not in ("largest-micro-batch", "longest-sequence")
        return nothing_found(cases, self.asked, why, helped=helped)


def answer_inverse(
    find: str,
    job: WorkloadRequest,
    models: Sequence[ModelLike],
    clusters: list[Cluster],
    precisions: list[str | None],
    asked: SurveyRequest,
    at_most: int | None,
) -> InverseAnswer:
    """Answer an inverse question; see the head of this file."""
    if asked.pareto is not None:
        raise InputError("--find and --pareto are two questions; ask one at a time")
    one = _Inverse(find, job, clusters, precisions, asked)
    if find == "largest-model":
        return _largest_model(one, [model_of(model) for model in models])
    if find == "fewest-gpus":
        return _fewest_gpus(one, at_most)
    if find == "longest-sequence":
        return _longest_sequence(one)
    if find == "largest-micro-batch":
        return _largest_micro_batch(one)
    return _best_of_all(one)


def _fewest_gpus(one: _Inverse, at_most: int | None) -> InverseAnswer:
    """Try from the smallest on: the clusters that are named, or the sizes of the one that is."""
    sizes = one.clusters
    if len(sizes) == 1:
        whole = sizes[0]
        sizes = [part_of(whole, number) for number in _sizes(whole)]
    sizes = sorted(sizes, key=lambda cluster: cluster.num_gpus)
    sizes = [cluster for cluster in sizes if at_most is None or cluster.num_gpus <= at_most]
    if not sizes:
        raise InputError(f"gpus_at_most = {at_most}: no cluster has so few")
    numbers = sorted({cluster.num_gpus for cluster in sizes})
    tried: list[Attempt] = []
    for number in numbers:
        same = [cluster for cluster in sizes if cluster.num_gpus == number]
        words = f"{number:,} accelerator" + ("" if number == 1 else "s")
        tried.append(one.ask(number, words, one.scenarios(same)))
        if tried[-1].fits:
            return one.answer(tried, tried[-1], tried[-2] if len(tried) > 1 else None)
    raise one.nothing(tried)


def _sizes(cluster: Cluster) -> list[int]:
    """Divisors of a node, then whole nodes; CPU processes as they are."""
    if cluster.accelerator.device == "cpu":
        return [cluster.num_gpus]
    per_node = cluster.gpus_per_node
    return sorted({*divisors(per_node), *(n * per_node for n in range(1, cluster.num_nodes + 1))})


def _largest_micro_batch(one: _Inverse) -> InverseAnswer:
    """Divisors of a batch that is given, from the largest on; else bisected."""
    _require_free(one, "micro_batch_size")

    def ask(size: int, batch: int | None, **changes: Any) -> Attempt:
        job = one.job if batch is None else replace(one.job, batch=batch)
        asked = replace(one, job=job)
        fixed = {**one.asked.fixed, "micro_batch_size": size}
        words = f"micro-batches of {size:,}"
        return asked.ask(size, words, asked.scenarios(), fixed=fixed, **changes)

    if one.job.batch is not None:
        tried = []
        for size in reversed(divisors(one.job.batch)):
            tried.append(ask(size, None))
            if tried[-1].fits:
                return one.answer(tried, tried[-1], tried[-2] if len(tried) > 1 else None)
        raise one.nothing(tried)
    ranks = one.largest

    def goes_to(found: RankedPlan, highest: int) -> int:
        def larger(size: int) -> bool:
            plan = replace(found.plan, micro_batch_size=size)
            workload = replace(found.scenario.workload, global_batch_size=plan.global_batch_size)
            return fits(replace(found.scenario, workload=workload), plan)

        return largest(larger, highest)

    def ask_size(size: int, **changes: Any) -> Attempt:
        return ask(size, size * ranks, **changes)

    return _furthest(one, ask_size, goes_to, MAX_BATCH // ranks)


def _longest_sequence(one: _Inverse) -> InverseAnswer:
    """Bisect in steps at which what is legal stays legal."""
    if one.job.options.get("seq_len") is not None:
        raise InputError("--find longest-sequence finds --seq-len; leave it out")
    model = one.job.model
    step = sequence_step(one.largest)
    highest = MAX_SEQ_LEN
    if model.max_seq_len_is_hard and model.max_seq_len is not None:
        highest = model.max_seq_len
        step = math.gcd(step, highest) if highest < step else step

    def ask(units: int, **changes: Any) -> Attempt:
        length = units * step
        words = f"sequences of {length:,} tokens"
        return one.ask(length, words, one.scenarios(seq_len=length), **changes)

    def goes_to(found: RankedPlan, highest: int) -> int:
        def longer(units: int) -> bool:
            return fits(with_seq_len(found.scenario, units * step), found.plan)

        return largest(longer, highest)

    return _furthest(one, ask, goes_to, highest // step)


def sequence_step(num_gpus: int) -> int:
    """Return tokens: a multiple of 2 x tp x cp for all degrees, where that is fine enough.

    >>> sequence_step(8), sequence_step(1024), sequence_step(10**5)
    (128, 2048, 4096)
    """
    return min(math.lcm(FINEST, 2 * num_gpus), COARSEST)


def _furthest(
    one: _Inverse,
    ask: Callable[..., Attempt],
    goes_to: Callable[[RankedPlan, int], int],
    highest: int,
) -> InverseAnswer:
    """Return the largest number from 1 on that fits, and the next one, that does not.

    Bisection, helped by leaps: from a number with plans that fit as far as one of these plans goes
    alone (``goes_to``, cheap), and then to the next number, at which mostly nothing fits any more.
    (What is required may end a leap earlier: then there are none.)
    """
    tried: dict[int, Attempt] = {}

    def has_plan(number: int) -> bool:
        tried[number] = ask(number, objective="memory", top=1)  # the smallest goes furthest
        return tried[number].fits

    if highest < 1 or not has_plan(1):
        raise one.nothing(list(tried.values()))
    low, high, leapt = 1, highest + 1, False
    while high - low > 1:
        plans = [f for case in tried[low].cases for f in case.found if f.fits]
        leap = low if leapt or one.asked.require else max(goes_to(f, high - 1) for f in plans)
        near = low + 1 if leapt else (low + high) // 2  # next to where a leap ended; else half-way
        number = leap if leap > low else near
        good = has_plan(number)
        leapt = good and number == leap > low
        low, high = (number, high) if good else (low, number)
    beyond = tried[high] if high <= highest else None
    return one.answer(list(tried.values()), ask(low), beyond)


def _largest_model(one: _Inverse, models: Sequence[ModelSpec]) -> InverseAnswer:
    """Try from the largest on."""
    tried: list[Attempt] = []
    for model in sorted(models, key=lambda model: -model.num_parameters):
        asked = replace(one, job=replace(one.job, model=model))
        words = f"{model.name} ({format_count(model.num_parameters)} parameters)"
        tried.append(asked.ask(model.name, words, asked.scenarios()))
        if tried[-1].fits:
            return one.answer(tried, tried[-1], tried[-2] if len(tried) > 1 else None)
    raise one.nothing(tried)


def _best_of_all(one: _Inverse) -> InverseAnswer:
    """Search all clusters: fewest dollars a token, or most tokens for a budget."""
    objective = "cost" if one.find == "cheapest-cluster" else one.asked.objective
    if one.find == "most-tokens":
        job = one.asked.job
        if job.tokens is not None or (job.budget is None and job.days is None):
            raise InputError("--find most-tokens needs --budget or --days, and finds --tokens")
    changes = {"objective": objective}
    every = one.ask(None, "all clusters", one.scenarios(), **changes)
    if not any(case.found for case in every.cases):
        raise one.nothing([every])
    answer = one.answer([], every, None, **changes)
    best = answer.answer.ranked[0]
    value: Any = best.scenario.cluster.name
    words = f"{value}"
    if one.find == "most-tokens":
        assert best.run is not None  # a budget is priced, or refused
        value = best.run.cost.tokens
        words = f"{format_count(value)} tokens on {best.scenario.cluster.name}"
    return replace(answer, value=value, words=words)


def _require_free(one: _Inverse, name: str) -> None:
    """Raise where what is asked for is pinned."""
    named: Mapping[str, Any] = one.asked.fixed
    clash: list[Constraint] = [c for c in one.asked.require if c.name == name]
    if name in named or clash:
        raise InputError(f"--find {one.find} finds {name}; do not pin it")
