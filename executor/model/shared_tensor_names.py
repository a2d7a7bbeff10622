"""Names of shared tensors on each stage that holds a copy of them."""

from __future__ import annotations

from cost_models.partition.shared_tensors import SharedTensor, bridge_stage, shared_tensors
from cost_models.plan_file import PlanFile
from executor.model.families import FAMILIES


def names_by_stage(file: PlanFile) -> dict[str, dict[int, str]]:
    """Return, by a shared tensor's name in the whole model, its name on every stage that has it.

    The first stage holds the tensor itself, the others a copy.
    """
    shared = shared_tensors(file.model, file.layer_ranges)
    return {tensor.weight.name: _names(file, tensor) for tensor in shared}


def _names(file: PlanFile, tensor: SharedTensor) -> dict[int, str]:
    name = tensor.weight.name
    if tensor.layers:
        prefixes = [file.model.layer_prefixes[layer] for layer in tensor.layers]
        within = name.removeprefix(prefixes[0])
        return {s: f"{p}{within}" for s, p in zip(tensor.stages, prefixes, strict=True)}
    family = FAMILIES[file.model.family]
    names = {tensor.stages[-1]: f"{family.projection}.weight"}
    if (bridge := bridge_stage(file.model, file.layer_ranges)) is not None:
        names[bridge] = f"{family.decoder_tokens}.weight"
    return {stage: names.get(stage, name) if stage else name for stage in tensor.stages}
