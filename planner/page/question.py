"""A question as the page asks it: the fields of its form, read from the query of an address.

Every field is text with a limit of its own. Models are presets, hub ids, sizes or the text of a
config.json, clusters are names: nothing that a client sends is ever taken as a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, urlencode

from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import CONTEXT_METHODS, OFFLOADS, SCHEDULES, Plan
from cost_models.plan.recompute import WORDS
from cost_models.plan.workload import Optimizer, Precision
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import parse_json
from hardware_profiles.options import read_count
from hardware_profiles.software.trainer import profile_names
from planner.exchange.names import target_names
from planner.request.clusters import cluster_of, split_clusters
from planner.request.model import named_model
from planner.request.options.choices import OBJECTIVES

Kind = Literal["text", "count", "choice", "amount"]
SHORT: Final = 200  # characters of a field
MAX_CONFIG: Final = 32_000  # characters of a config.json
MAX_QUERY: Final = 100_000  # bytes of an address behind its question mark
DEFAULT_MODEL, DEFAULT_CLUSTER = "llama-3-8b", "8xA100-80GB"
ON_OFF: Final = ("on", "off")
_CLUSTER: Final = re.compile(r"[\w .,:@*×+-]+")
_NUMBER: Final = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of the form."""

    name: str  # in the address
    label: str
    kind: Kind = "text"
    argument: str = ""  # of ``planner.fit``; "": not one
    choices: tuple[str, ...] = ()
    hint: str = ""
    most: int = SHORT  # characters
    slider: tuple[int, int] | None = None  # exponents of two


TRAINERS: Final = tuple(sorted({*profile_names(), *target_names()}))
FIELDS: Final = (
    FormField("model", "Model", hint="preset, Hugging Face id, or size such as 7b"),
    FormField("config", "config.json", hint="pasted text; it replaces the name", most=MAX_CONFIG),
    FormField("cluster", "Cluster", hint="8xA100-80GB, 16x8xH100-SXM"),
    FormField("seq_len", "Sequence length", "count", "seq_len", slider=(7, 20)),
    FormField("batch", "Global batch", "count", "global_batch_size", slider=(0, 14)),
    FormField("precision", "Precision", "choice", "precision", get_args(Precision)),
    FormField("optimizer", "Optimizer", "choice", "optimizer", get_args(Optimizer)),
    FormField("software", "Trainer", "choice", "software", TRAINERS),
    FormField("lora", "LoRA rank", "count", "lora"),
    FormField("qlora", "QLoRA rank", "count", "qlora"),
    FormField("tp", "Tensor parallel", "count", "tensor_parallel"),
    FormField("pp", "Pipeline parallel", "count", "pipeline_parallel"),
    FormField("cp", "Context parallel", "count", "context_parallel"),
    FormField("ep", "Expert parallel", "count", "expert_parallel"),
    FormField("zero", "ZeRO stage", "choice", "zero_stage", ("0", "1", "2", "3")),
    FormField("recompute", "Recompute", "choice", "recompute", tuple(WORDS)),
    FormField("mbs", "Micro-batch", "count", "micro_batch_size"),
    FormField("schedule", "Schedule", "choice", "pipeline_schedule", SCHEDULES),
    FormField("vp", "Stages per rank", "count", "virtual_stages"),
    FormField("layers", "Recomputed layers", "count", "recompute_layers"),
    FormField("sp", "Sequence parallel", "choice", "sequence_parallel", ON_OFF),
    FormField("cp_method", "Context method", "choice", "context_parallel_method", CONTEXT_METHODS),
    FormField("etp", "Experts split too", "choice", "expert_tensor_parallel", ON_OFF),
    FormField("rep", "Replicas", "count", "dp_replicate"),
    FormField("offload", "Offload", "choice", "offload", OFFLOADS),
    FormField("objective", "Search for the least", "choice", choices=OBJECTIVES),
    FormField("require", "Require", hint="tp<=8, memory<=70GiB"),
    FormField("keep", "Keep the plan above", "choice", choices=("1",)),
    FormField("clusters", "Clusters", hint="8xA100-80GB, 1..4x8xH100-SXM", most=500),
    FormField("price", "Dollars per hour", hint="2.5, or H100-SXM-80GB=3,A100-SXM-80GB=1.8"),
    FormField("tokens", "Tokens of the run", "amount", hint="300B or 1.5T"),
    FormField("why_not", "Why not", hint="tp=8,pp=2"),
    FormField("found", "Of the best plan", "choice", choices=("1",)),
    FormField("to", "Export to", "choice", choices=tuple(target_names())),
)
BY_NAME: Final = {field.name: field for field in FIELDS}
COMMON_PLAN: Final = ("tp", "pp", "cp", "ep", "zero", "recompute", "mbs")
FURTHER_PLAN: Final = (*("schedule", "vp", "layers", "sp", "cp_method", "etp", "rep", "offload"),)
PLAN_FIELDS: Final = (*COMMON_PLAN, *FURTHER_PLAN)
ALONE: Final = {  # a field that is without effect at 1 of another one
    "schedule": "pipeline_parallel",
    "vp": "pipeline_parallel",
    "sp": "tensor_parallel",
    "cp_method": "context_parallel",
}
HELD: Final = ("zero", "recompute", "mbs")  # with these a plan is complete
WORKLOAD_FIELDS: Final = ("seq_len", "batch", "precision", "optimizer", "software", "lora", "qlora")


@dataclass(frozen=True, slots=True)
class PageQuestion:
    """The fields that a client gave, in the order of the form."""

    values: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(given: Mapping[str, str]) -> PageQuestion:
        """Return the question of some fields; empty ones are left out."""
        kept = {name: text.strip() for name, text in given.items()}
        return PageQuestion(tuple((f.name, kept[f.name]) for f in FIELDS if kept.get(f.name)))

    def get(self, name: str) -> str:
        """Return a field; "" where it was left out."""
        return dict(self.values).get(name, "")

    def address(self, **changes: str) -> str:
        """Return the query of the question with some fields changed; "" drops one.

        >>> PageQuestion.of({"model": "gpt2", "tp": "2"}).address(tp="", cluster="8xL40S")
        'model=gpt2&cluster=8xL40S'
        """
        return urlencode(PageQuestion.of({**dict(self.values), **changes}).values)

    @property
    def model(self) -> ModelSpec:
        """The model of the pasted config.json, or of the name."""
        config = self.get("config")
        return _of_config(config) if config else _named(self.get("model") or DEFAULT_MODEL)

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return _cluster(self.get("cluster") or DEFAULT_CLUSTER)

    @property
    def workload(self) -> dict[str, Any]:
        """Arguments of ``planner.fit`` and ``planner.plan`` for the training."""
        return self._arguments(WORKLOAD_FIELDS)

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments of ``planner.fit`` for the plan.

        Data parallelism takes the ranks that are left where ZeRO, recomputation and micro-batch
        size are given, so that nothing is searched; ZeRO with one rank to shard over is stage 0
        unless it offloads.
        """
        plan = self._arguments(PLAN_FIELDS)
        if all(self.get(name) for name in HELD):
            ranks = plan.get("tensor_parallel", 1) * plan.get("pipeline_parallel", 1)
            ranks *= plan.get("context_parallel", 1)
            num_gpus = self.cluster.num_gpus
            if ranks and num_gpus % ranks == 0:
                plan["data_parallel"] = num_gpus // ranks
                alone = plan["data_parallel"] * plan.get("context_parallel", 1) == 1
                if alone and not Plan(offload=plan.get("offload", "none")).offloads_optimizer:
                    plan["zero_stage"] = 0
        return plan

    @property
    def pins(self) -> dict[str, Any] | None:
        """The plan as pins of a search, if it is kept."""
        return self.plan if self.get("keep") else None

    @property
    def clusters(self) -> list[Cluster]:
        """The clusters to compare."""
        text = self.get("clusters") or self.get("cluster") or DEFAULT_CLUSTER
        return [_cluster(name) for name in split_clusters(_named_clusters(text))]

    def _arguments(self, names: tuple[str, ...]) -> dict[str, Any]:
        given = dict(self.values)
        return {
            field.argument: _value(field, given[field.name])
            for field in (BY_NAME[name] for name in names)
            if field.name in given
        }


def with_labels(text: str) -> str:
    """Return an error with the labels of the form in place of names of arguments.

    >>> with_labels("tensor_parallel = 3 does not divide num_heads = 32")
    'Tensor parallel = 3 does not divide num_heads = 32'
    """
    for field in FIELDS:
        if "_" in field.argument:
            text = re.sub(rf"(?<![\w'-]){field.argument}(?!\w)", field.label, text)
    return text


def read_question(query: str) -> PageQuestion:
    """Return the question of an address.

    Raises where a field is unknown, doubled, too long, no number, or none of its choices.
    """
    if len(query) > MAX_QUERY:
        raise InputError(f"the address has {len(query):,} characters (at most {MAX_QUERY:,})")
    try:
        pairs = parse_qsl(query, errors="strict", max_num_fields=2 * len(FIELDS))
    except ValueError as error:
        raise InputError(f"the address cannot be read: {error}") from None
    given: dict[str, str] = {}
    for name, text in pairs:
        field = BY_NAME.get(name)
        if field is None:
            same = next((one.name for one in FIELDS if one.argument == name), "")
            hint = f"It is {same}" if same else did_you_mean(name[:40], BY_NAME)
            raise InputError(f"no field is called {name[:40]!r}. {hint}".rstrip())
        if name in given:
            raise InputError(f"{field.label}: given twice")
        if len(text) > field.most:
            raise InputError(
                f"{field.label}: {len(text):,} characters are too many (at most {field.most:,})"
            )
        if text.strip():
            _value(field, text.strip())  # raises
        given[name] = text
    return PageQuestion.of(given)


def _value(field: FormField, text: str) -> Any:
    """Return the value of a field as ``planner.fit`` takes it."""
    if field.kind == "count":
        try:
            return read_count(text)
        except (ValueError, OverflowError):
            raise InputError(
                f"{field.label}: {text[:40]!r} is not a whole number such as 8 or 4k"
            ) from None
    if field.kind == "choice":
        if text not in field.choices:
            raise InputError(
                f"{field.label}: {text[:40]!r} (must be one of {', '.join(field.choices)})"
            )
        if field.choices == ON_OFF:
            return text == "on"
        return int(text) if _NUMBER.fullmatch(text) else text
    return text


def fields_of(plan: Plan) -> dict[str, str]:
    """Return a plan as fields of the form; those at their defaults are empty.

    >>> {k: v for k, v in fields_of(Plan(data_parallel=8, zero_stage=3)).items() if v}
    {'zero': '3', 'recompute': 'none', 'mbs': '1'}
    """
    usual = Plan()
    shown: dict[str, str] = {}
    for field in (BY_NAME[name] for name in PLAN_FIELDS):
        value = getattr(plan, field.argument)
        other = ALONE.get(field.name)
        silent = value == getattr(usual, field.argument)
        if other is not None:  # named wherever it has an effect
            silent = getattr(plan, other) == 1
        text = ("off", "on")[value] if isinstance(value, bool) else str(value)
        shown[field.name] = "" if silent and field.name not in HELD else text
    return shown


@lru_cache(maxsize=64)
def _of_config(text: str) -> ModelSpec:
    config = parse_json(text, "config.json")
    return model_spec(config, name=str(config.get("_name_or_path") or "config.json")[:SHORT])


@lru_cache(maxsize=64)
def _named(text: str) -> ModelSpec:
    return named_model(text)


@lru_cache(maxsize=64)
def _cluster(text: str) -> Cluster:
    return cluster_of(_named_clusters(text))


def _named_clusters(text: str) -> str:
    """Return a text that names clusters, or raise where it might be a file or this machine."""
    words = text.lower().strip()
    here = any(part.strip().split(":")[0] == "here" for part in words.split(","))
    if not _CLUSTER.fullmatch(text) or ".toml" in words or here:
        raise InputError(
            f"cluster {text[:60]!r}: the page takes names such as 8xA100-80GB or 16x8xH100-SXM; "
            "files and this machine (here) are for the command line"
        )
    return text
