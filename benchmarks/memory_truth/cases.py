"""A case in a line of text: model, plan and workload."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.presets import load_preset
from cost_models.plan.plan import Plan
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile
from planner.assessment.assess import plan_file

# words with a number, and the field that it is for
NUMBERS: Final = {
    "dp": "data_parallel",
    "copies": "dp_replicate",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "v": "virtual_stages",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "zero": "zero_stage",
    "b": "micro_batch_size",
    "m": "num_microbatches",
    "full": "recompute_layers",
    "every": "recompute_every",
    "s": "seq_len",
    "targets": "target_seq_len",
    "lora": "adapter_rank",
    "qlora": "adapter_rank",
}
WORDS: Final[dict[str, dict[str, Any]]] = {
    "sp": {"sequence_parallel": True},
    "whole-experts": {"expert_tensor_parallel": False},
    "full": {"recompute": "full"},
    "lora": {"adapter": "lora"},
    "qlora": {"adapter": "qlora"},
    "documents": {"document_mask": True},
    "eager": {"attention_kernel": "eager"},
    "sgd": {"optimizer": "sgd"},
    **{name: {"precision": name} for name in ("fp32", "fp16", "fp8")},
    **{name: {"context_parallel_method": name} for name in ("ring", "ulysses", "allgather")},
    **{
        name: {"pipeline_schedule": name}
        for name in (
            "gpipe",
            "interleaved_1f1b",
            "zero_bubble",
            "interleaved_zero_bubble",
            "zbv",
            "dualpipev",
        )
    },
}
FREEZE: Final = "freeze="
OFFLOAD: Final = "offload="
LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


@dataclass(frozen=True, slots=True)
class Case:
    """One rank of one plan."""

    text: str
    file: PlanFile
    stage: int  # pipeline rank

    @property
    def rank(self) -> int:
        """Its global rank: the first one of the stage."""
        plan = self.file.plan
        return self.stage * (plan.world_size // plan.pipeline_parallel)

    @property
    def prediction(self) -> dict[str, Any]:
        """What is predicted for its memory."""
        found: dict[str, Any] = self.file.prediction["memory"]["stages"][self.stage]
        return found


def read(text: str) -> list[Case]:
    """Return the cases of a line: first, second and last stage of a pipeline.

    ``llama-3-8b:4 s8192 dp8 zero3``: a preset with 4 layers left, and words of the tables above; a
    colon in a word comes before its number. ``full:2``: the first 2 layers of every stage (of every
    4: ``full:2 every:4``); ``ops:every-2nd-mm``, ``modules:mlp``: other settings of recomputation;
    ``freeze=embedding,layers:0-1``: parts that are not trained; ``offload=activations``.

    >>> [case.rank for case in read("llama-3-8b:8 s4096 tp2 pp4 m8")]
    [0, 2, 6]
    >>> read("llama-3-8b:4 freeze=embedding,layers:0-1")[0].file.workload.freeze
    'embedding,layers:0-1'
    """
    name, *words = text.split()
    values: dict[str, Any] = {"seq_len": 4096, "global_batch_size": 1}
    for word in words:
        if word.startswith(FREEZE):
            values["freeze"] = word.removeprefix(FREEZE)
            continue
        if word.startswith(OFFLOAD):
            values["offload"] = word.removeprefix(OFFLOAD)
            continue
        if word in RECOMPUTE:
            values["recompute"] = word
            continue
        match = re.fullmatch(r"(.*?):?(\d+)", word)
        key, number = match.groups() if match and word not in WORDS else (word, None)
        if key not in WORDS and key not in NUMBERS:
            raise ValueError(f"{word!r} in the case {text!r}")
        values |= WORDS.get(key, {})
        if number is not None:
            values[NUMBERS[key]] = int(number)
    plan = Plan(**{f.name: values[f.name] for f in fields(Plan) if f.name in values})
    workload = Workload(**{f.name: values[f.name] for f in fields(Workload) if f.name in values})
    workload = replace(
        workload,
        global_batch_size=plan.global_batch_size,
        adapter_alpha=2.0 * workload.adapter_rank,
    )
    config = config_of(name)
    file = file_of(config, plan, workload)
    stages = sorted({0, min(1, plan.pipeline_parallel - 1), plan.pipeline_parallel - 1})
    return [Case(text, file, stage) for stage in stages]


def config_of(name: str) -> dict[str, Any]:
    """Return the config of a preset, with fewer layers on demand: ``llama-3-8b:4``."""
    preset, _, layers = name.partition(":")
    config = dict(load_preset(preset).config)
    if layers:
        config |= {key: int(layers) for key in LAYERS if key in config}
        config.pop("layer_types", None)
    return config


def file_of(config: dict[str, Any], plan: Plan, workload: Workload) -> PlanFile:
    """Return a plan file; the cluster's figures do not matter for live tensors."""
    model = model_spec(config, name=str(config["model_type"]))
    scenario = Scenario(
        model=adapted(model, workload),
        cluster=parse_cluster("8xH100-SXM-80GB"),
        workload=workload,
        software=software_profile("shardplan"),
    )
    return plan_file(scenario, plan, "benchmarks.memory_truth")
