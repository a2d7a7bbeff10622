"""A planned training job as a target writes it: the plan file, and its options by name."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from msgspec import Struct

from cost_models.legality.capabilities import ONLY_WITH
from cost_models.model.presets import is_preset, load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import Plan
from cost_models.plan.workload import USUAL_RANK, Workload
from cost_models.plan_file import PlanFile
from cost_models.pricing.prediction import scenario_of
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.fields import names_in

# options of ``fit`` that a workload declares under the same name
OF_WORKLOAD: Final = names_in("""
    seq_len target_seq_len global_batch_size precision optimizer optimizer_rank
    optimizer_state_precision gradient_precision master_weights attention_kernel freeze
""")
# options that a file states always, since ``fit`` would search or derive them
ALWAYS: Final = names_in("""
    zero_stage recompute micro_batch_size num_microbatches global_batch_size seq_len precision
""")
# parts of a plan that follow from the others, the accelerators and the batch
FOLLOWING: Final = ("data_parallel", "num_microbatches", "recompute_layers", "recompute_every")


class Job(Struct, frozen=True, dict=True):
    """A plan file, and what a writer asks about it."""

    file: PlanFile

    @property
    def model(self) -> ModelSpec:
        """The model."""
        return self.file.model

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self.file.cluster

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.file.plan

    @property
    def workload(self) -> Workload:
        """The workload."""
        return self.file.workload

    @property
    def hub_name(self) -> str:
        """The model's name in the Hugging Face hub, or as it was typed."""
        name = self.model.name
        aliases = load_preset(name).aliases if is_preset(name) else ()
        return next((alias for alias in aliases if "/" in alias), name)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All options of the job, by their names in ``fit``."""
        return settings_of(self.file)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]


def settings_of(file: PlanFile) -> dict[str, Any]:
    """Return a plan file as options of ``fit``, without model, cluster and software."""
    workload = file.workload
    found = file.plan.to_dict()
    for name, with_name in ONLY_WITH.items():
        if found[with_name] == 1:
            del found[name]
    found |= {name: getattr(workload, name) for name in OF_WORKLOAD} | adapter_options(workload)
    more = file.plan.num_stages > file.model.num_layers  # which no trainer cuts by itself
    if more or file.layer_ranges != default_layer_ranges(scenario_of(file), file.plan):
        found["layers"] = ",".join(str(last - first) for first, last in file.layer_ranges)
    if file.stage_recompute_layers is not None:
        found["recompute_layers"] = ",".join(map(str, file.stage_recompute_layers))
    return found


def is_default(name: str, value: Any) -> bool:
    """Whether an option that a file leaves out has this value in ``fit``."""
    if name == "data_parallel":
        return True  # the accelerators that the other degrees leave
    if name in ALWAYS or name in ONLY_WITH:
        return False
    defaults = {"attention_kernel": "flash", "optimizer": "adamw", "master_weights": True}
    defaults |= {"freeze": "", "optimizer_state_precision": "auto", "gradient_precision": "auto"}
    defaults |= {"optimizer_rank": USUAL_RANK, "target_seq_len": 0}
    return bool(value == {**Plan().to_dict(), **defaults}.get(name))


def adapter_options(workload: Workload) -> dict[str, Any]:
    """Return the options that ask for a workload's adapters, by name."""
    if workload.adapter == "none":
        return {}
    found: dict[str, Any] = {workload.adapter: workload.adapter_rank}
    if workload.adapter_method != "lora":
        found["adapter_method"] = workload.adapter_method
    found |= {"lora_alpha": workload.adapter_alpha, "lora_targets": workload.adapter_targets}
    return found | ({"quantisation": workload.quantisation} if workload.adapter == "qlora" else {})
