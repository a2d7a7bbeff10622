"""Inverse queries: fewest accelerators, largest micro-batch, longest sequence, largest model.

Every answer is verified by forward searches: it has a plan that fits, and the next candidate has
none. Monotone quantities are bisected, the others are tried one by one:

    fewest-gpus           from the smallest number on (not monotone: batches and heads must be
                          divisible)
    largest-micro-batch   divisors of a given batch, from the largest on; without a batch bisected:
                          with one micro-batch for each accelerator the same layouts are legal for
                          every size, and their peaks grow with it
    longest-sequence      bisected in steps of lcm(128, 2 x accelerators) tokens: a layout that is
                          legal for one length is legal for all longer ones, and its peak grows
    largest-model         from the largest on
    cheapest-cluster      all clusters; fewest dollars a token
    most-tokens           all clusters; most tokens for --budget and --days
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import Struct, structs

from cost_models.model.spec import ModelSpec
from cost_models.plan_file import PlanFile
from cost_models.units import format_count
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NoLegalPlanError
from planner.answer.ranked_plan import RankedPlan
from planner.assessment.reach import largest_micro_batch, longest_sequence
from planner.request.clusters import part_of
from planner.request.constraints import Constraint
from planner.request.divisors import divisors
from planner.request.model import ModelLike, model_of
from planner.request.scenario import MAX_BATCH, MAX_SEQ_LEN, AssumedScenario
from planner.survey.answer import SurveyAnswer, assumptions_of, no_plan_error, survey_answer
from planner.survey.cases import OF_LARGEST, DefaultBatch, WorkloadRequest
from planner.survey.compare_cases import SurveyCase, SurveyRequest, ranked, survey
from planner.survey.text import inverse_lines
from planner.text.answer import DetailedAnswer

COARSEST: Final = 4096  # tokens; largest step between sequence lengths
FINEST: Final = 128
COMPARES: Final = ("cheapest-cluster", "most-tokens")  # clusters, by what they cost


class Attempt(Struct, frozen=True):
    """One candidate of an inverse query, with its forward searches."""

    value: Any  # accelerators, sequences, tokens, or a model's name
    words: str
    cases: tuple[SurveyCase, ...]

    @property
    def fits(self) -> bool:
        """Whether a plan fits with its whole interval."""
        return any(found.fits for case in self.cases for found in case.found)


@dataclass(frozen=True, slots=True, repr=False)
class InverseAnswer(DetailedAnswer):
    """Answer of an inverse query, with the searches that verify it."""

    find: str
    value: Any
    words: str
    tried: tuple[Attempt, ...]  # in the order of the searches
    next_attempt: Attempt | None  # the next candidate, which has no plan; None: no next one
    answer: SurveyAnswer  # forward answer at the value

    @property
    def best(self) -> Any:
        """The best plan at the value."""
        return self.answer.best

    @property
    def scenario(self) -> Any:
        """The scenario of that plan."""
        return self.answer.scenario

    def plan_file(self, rank: int = 0) -> PlanFile:
        """Return the contents of a plan.json for the plan of that rank (0: the best)."""
        return self.answer.plan_file(rank)

    def notebook_parts(self) -> Iterator[str]:
        """Yield the answer, the next value that has no plan, and the plan."""
        from planner.text.notebook import headline

        beyond = self.next_attempt
        yield headline(self.words, f"No plan with {beyond.words}." if beyond else "")
        yield from self.answer.notebook_parts()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            **self.answer.to_dict(),
            "find": self.find,
            "value": self.value,
            "answer": self.words,
            "tried": [{"value": one.value, "fits": one.fits} for one in self.tried],
            "next": None
            if self.next_attempt is None
            else {"value": self.next_attempt.value, "fits": self.next_attempt.fits},
        }

    def text(self, *, verbose: bool = False) -> str:
        """Return the text; ``verbose``: with all assumptions, sources and counts."""
        beyond = (
            None
            if self.next_attempt is None
            else (self.next_attempt.words, self.next_attempt.cases)
        )
        lines = inverse_lines(self.find, self.words, beyond, tried=bool(self.tried))
        answer = self.answer.text(verbose=verbose, lines_before=len(lines))
        return "\n".join([*lines, answer])


class _Inverse(Struct, frozen=True):
    """Inputs of all inverse queries."""

    find: str
    job: WorkloadRequest
    clusters: list[Cluster]
    precisions: list[str | None]
    request: SurveyRequest

    @property
    def largest(self) -> int:
        """Accelerators of the largest cluster."""
        return max(cluster.num_gpus for cluster in self.clusters)

    def ask(
        self, value: Any, words: str, scenarios: Sequence[AssumedScenario], **changes: Any
    ) -> Attempt:
        """Run the forward searches for one candidate."""
        request = structs.replace(self.request, offload_if_needed=False, **changes)
        return Attempt(value, words, tuple(survey(scenarios, request)))

    def scenarios(
        self, clusters: Sequence[Cluster] | None = None, **changes: Any
    ) -> list[AssumedScenario]:
        """Return the scenarios of one candidate."""
        job = structs.replace(self.job, options={**self.job.options, **changes})
        chosen = self.clusters if clusters is None else clusters
        batch: DefaultBatch | None = None
        if self.find in COMPARES:
            batch = job.common_batch(chosen)
        elif len(self.clusters) > 1 or clusters is not None:
            batch = DefaultBatch(self.largest, OF_LARGEST)
        return [
            job.scenario(cluster, batch, precision=precision)
            for cluster in chosen
            for precision in self.precisions
        ]

    def answer(
        self, tried: Sequence[Attempt], found: Attempt, next_attempt: Attempt | None, **changes: Any
    ) -> InverseAnswer:
        """Return the answer for a candidate that was found."""
        request = structs.replace(self.request, **changes)
        cases = found.cases
        best = tuple(ranked(cases, request))
        assumptions = tuple(assumptions_of(cases, best, request))
        forward = survey_answer(request, cases, best, assumptions)
        return InverseAnswer(
            self.find, found.value, found.words, tuple(tried), next_attempt, forward
        )

    def nothing(self, tried: Sequence[Attempt]) -> NoLegalPlanError:
        """Return the error if no candidate has a plan that fits."""
        cases, why = tried[-1].cases, f"--find {self.find}: not even {tried[-1].words}"
        # the smallest size has no plan: changes of other options would not answer the query
        suggests = self.find not in ("largest-micro-batch", "longest-sequence")
        return no_plan_error(cases, self.request, why, suggests=suggests)


def answer_inverse(
    find: str,
    job: WorkloadRequest,
    models: Sequence[ModelLike],
    clusters: list[Cluster],
    precisions: list[str | None],
    request: SurveyRequest,
    at_most: int | None,
) -> InverseAnswer:
    """Answer an inverse query; see the module docstring."""
    if request.pareto is not None:
        raise InputError("--find and --pareto cannot be combined; use one at a time")
    one = _Inverse(find, job, clusters, precisions, request)
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
    """Try from the smallest on: the named clusters, or all sizes of a single one."""
    sizes = one.clusters
    if len(sizes) == 1:
        whole = sizes[0]
        sizes = [part_of(whole, number) for number in _sizes(whole)]
    sizes = sorted(sizes, key=lambda cluster: cluster.num_gpus)
    sizes = [cluster for cluster in sizes if at_most is None or cluster.num_gpus <= at_most]
    if not sizes:
        raise InputError(f"gpus_at_most = {at_most}: every cluster has more")
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
    """Return divisors of a node, then whole nodes; the number itself for CPU processes."""
    if cluster.accelerator.device == "cpu":
        return [cluster.num_gpus]
    per_node = cluster.gpus_per_node
    return sorted({*divisors(per_node), *(n * per_node for n in range(1, cluster.num_nodes + 1))})


def _largest_micro_batch(one: _Inverse) -> InverseAnswer:
    """Try the divisors of a given batch from the largest on; bisect without a batch."""
    _require_free(one, "micro_batch_size")

    def ask(size: int, batch: int | None, **changes: Any) -> Attempt:
        job = one.job if batch is None else structs.replace(one.job, batch=batch)
        request = structs.replace(one, job=job)
        fixed = {**one.request.fixed, "micro_batch_size": size}
        words = f"micro-batches of {size:,}"
        return request.ask(size, words, request.scenarios(), fixed=fixed, **changes)

    if one.job.batch is not None:
        tried = []
        for size in reversed(divisors(one.job.batch)):
            tried.append(ask(size, None))
            if tried[-1].fits:
                return one.answer(tried, tried[-1], tried[-2] if len(tried) > 1 else None)
        raise one.nothing(tried)
    ranks = one.largest

    def limit_of(found: RankedPlan, highest: int) -> int:
        return largest_micro_batch(found.scenario, found.plan, highest)

    def ask_size(size: int, **changes: Any) -> Attempt:
        return ask(size, size * ranks, **changes)

    return _furthest(one, ask_size, limit_of, MAX_BATCH // ranks)


def _longest_sequence(one: _Inverse) -> InverseAnswer:
    """Bisect in steps at which legal layouts stay legal."""
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

    def limit_of(found: RankedPlan, highest: int) -> int:
        return longest_sequence(found.scenario, found.plan, highest * step, step) // step

    return _furthest(one, ask, limit_of, highest // step)


def sequence_step(num_gpus: int) -> int:
    """Return tokens between lengths: a multiple of 2 x tp x cp for all degrees, up to COARSEST.

    >>> sequence_step(8), sequence_step(1024), sequence_step(10**5)
    (128, 2048, 4096)
    """
    return min(math.lcm(FINEST, 2 * num_gpus), COARSEST)


def _furthest(
    one: _Inverse,
    ask: Callable[..., Attempt],
    limit_of: Callable[[RankedPlan, int], int],
    highest: int,
) -> InverseAnswer:
    """Return the largest number from 1 on that fits, and the next one, which does not.

    Bisection with leaps: from a number with plans that fit to the largest number at which one of
    these plans fits (``limit_of``, cheap), then to the next number, at which mostly nothing fits.
    Without leaps if there are requirements, which may end the range earlier.
    """
    tried: dict[int, Attempt] = {}

    def has_plan(number: int) -> bool:
        tried[number] = ask(number, objective="memory", top=1)  # the smallest plan
        return tried[number].fits

    if highest < 1 or not has_plan(1):
        raise one.nothing(list(tried.values()))
    low, high, leapt = 1, highest + 1, False
    while high - low > 1:
        plans = [f for case in tried[low].cases for f in case.found if f.fits]
        leap = low if leapt or one.request.require else max(limit_of(f, high - 1) for f in plans)
        near = low + 1 if leapt else (low + high) // 2  # next to the end of a leap, else the middle
        number = leap if leap > low else near
        good = has_plan(number)
        leapt = good and number == leap > low
        low, high = (number, high) if good else (low, number)
    beyond = tried[high] if high <= highest else None
    return one.answer(list(tried.values()), ask(low), beyond)


def _largest_model(one: _Inverse, models: Sequence[ModelSpec]) -> InverseAnswer:
    """Try the models from the largest on."""
    tried: list[Attempt] = []
    for model in sorted(models, key=lambda model: -model.num_parameters):
        request = structs.replace(one, job=structs.replace(one.job, model=model))
        words = f"{model.name} ({format_count(model.num_parameters)} parameters)"
        tried.append(request.ask(model.name, words, request.scenarios()))
        if tried[-1].fits:
            return one.answer(tried, tried[-1], tried[-2] if len(tried) > 1 else None)
    raise one.nothing(tried)


def _best_of_all(one: _Inverse) -> InverseAnswer:
    """Search all clusters: fewest dollars a token, or most tokens for a budget."""
    objective = "cost" if one.find == "cheapest-cluster" else one.request.objective
    if one.find == "most-tokens":
        job = one.request.job
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
        assert best.run is not None  # an unknown price is an error
        value = best.run.cost.tokens
        words = f"{format_count(value)} tokens on {best.scenario.cluster.name}"
    return replace(answer, value=value, words=words)


def _require_free(one: _Inverse, name: str) -> None:
    """Raise an InputError if the quantity to find is pinned."""
    named: Mapping[str, Any] = one.request.fixed
    clash: list[Constraint] = [c for c in one.request.require if c.name == name]
    if name in named or clash:
        raise InputError(f"--find {one.find} finds {name}; do not pin it")
