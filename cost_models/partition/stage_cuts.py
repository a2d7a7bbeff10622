"""The layers of each pipeline stage, as trainers cut a model.

    even        layers alone, as evenly as possible (``split_layers``)
    ends        embedding and head count as a layer each; what is left over goes to the first stages
    parameters  the largest stage has as few parameters as possible, embedding and head included
    cost        the same for FLOP of a forward pass
    thresholds  a stage takes layers until all so far exceed its even share of the FLOP, as if
                keys and values had all heads

Source: torchtitan, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part (input_weight,
output_weight 1); Megatron Core, account_for_embedding_in_pipeline_split and
account_for_loss_in_pipeline_split; DeepSpeed, runtime/pipe/module.py, PipelineModule
(partition_method parameters) and runtime/utils.py, partition_balanced; nanotron, models/base.py,
build_model, and models/llama.py, get_block_compute_costs. Leaves out: stages without a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from cost_models.model.parameters import active_kind_parameters
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.plan.plan import split_layers
from hardware_profiles.software.trainer import StageCut

Ranges = tuple[tuple[int, int], ...]


def cut_layers(cut: StageCut, model: ModelSpec, num_stages: int) -> Ranges:
    """Return the layers [first, last) of each stage; every stage has a layer.

    >>> from cost_models.model.presets import load_preset
    >>> from cost_models.model.families import model_spec
    >>> model = model_spec(load_preset("llama-3-8b").config, name="llama-3-8b")
    >>> [last - first for first, last in cut_layers("ends", model, 8)]
    [4, 5, 4, 4, 4, 4, 4, 3]
    >>> [last - first for first, last in cut_layers("parameters", model, 4)]
    [7, 9, 9, 7]
    >>> [last - first for first, last in cut_layers("thresholds", model, 4)]
    [9, 9, 8, 6]
    """
    layers = model.num_layers
    if cut == "even" or num_stages == 1 or num_stages == layers:
        return split_layers(layers, num_stages)
    if cut == "ends":
        each, left = divmod(layers + 2, num_stages)
        sizes = [each + (stage < left) for stage in range(num_stages)]
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
        if min(sizes) < 1:
            return split_layers(layers, num_stages)
        return _ranges(sizes)
    kinds = model.stage_kinds(0, layers)
    if cut == "thresholds":
        costs = [_with_all_heads(model.kinds[kind], model.hidden_size) for kind in kinds]
        return _past_thresholds(costs, 1.0 * model.vocab_size * model.hidden_size, num_stages)
    if cut == "parameters":
        of_kinds = [_numel(kind.weights) for kind in model.kinds]
        first, last = _numel(model.embedding), _numel(model.head)
    else:  # half the FLOP of a token; the embedding is a look-up
        of_kinds = [active_kind_parameters(kind) for kind in model.kinds]
        first, last = 0.0, 1.0 * model.vocab_size * model.hidden_size
    inner = [of_kinds[kind] for kind in kinds]
    inner[0], inner[-1] = inner[0] + first, inner[-1] + last
    return _balanced(inner, num_stages)


def _numel(weights: Sequence[Weight]) -> float:
    return float(sum(weight.numel for weight in weights))


def _with_all_heads(kind: LayerKind, hidden_size: int) -> float:
    """Half the FLOP of a token in a layer: four matrices of attention, three of the MLP."""
    attention = 4.0 * kind.attention.num_heads * kind.attention.head_dim
    return hidden_size * (attention + 3.0 * kind.feed_forward.ffn_hidden_size)


def _past_thresholds(layers: Sequence[float], head: float, num_stages: int) -> Ranges:
    """Return stages that end with the first layer past their share; each has one at least."""
    share = (sum(layers) + head) / num_stages
    sizes, total = [0], 0.0
    for number, cost in enumerate(layers):
        empty = num_stages - len(sizes)
        if sizes[-1] and empty and (total > len(sizes) * share or len(layers) - number == empty):
            sizes.append(0)
        sizes[-1] += 1
        total += cost
    return _ranges(sizes)


def _balanced(sizes: Sequence[float], num_stages: int) -> Ranges:
    """Return the stages, in order, of which the largest is as small as possible."""
    total = [0.0, *accumulate(sizes)]
    count = len(sizes)
    # least[s][n]: the smallest possible largest stage of the first n layers in s stages
    least = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    before = [[0] * (count + 1) for _ in range(num_stages + 1)]
    least[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, count - (num_stages - stage) + 1):
            for start in range(stage - 1, end):
                largest = max(least[stage - 1][start], total[end] - total[start])
                if largest < least[stage][end]:
                    least[stage][end], before[stage][end] = largest, start
    ends = [count]
    for stage in range(num_stages, 0, -1):
        ends.append(before[stage][ends[-1]])
    ends.reverse()
    return tuple(pairwise(ends))


def _ranges(sizes: Sequence[int]) -> Ranges:
    ends = [0, *accumulate(sizes)]
    return tuple(pairwise(ends))
