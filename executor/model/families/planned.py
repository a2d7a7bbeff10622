"""Configuration of a model's layer under a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from cost_models.model.spec import LayerKind
from cost_models.plan.recompute import BY_OPERATOR, CORE, modules_of
from cost_models.plan_file import PlanFile
from executor.attention.core import AttentionCore
from executor.model.families.description import Family, Layer
from executor.parallel.context_parallel import ContextAxis
from executor.parallel.expert_parallel import ExpertAxis
from executor.parallel.tensor_parallel import TensorAxis


def planned_layer(
    file: PlanFile,
    family: Family,
    kind: LayerKind,
    module: nn.Module,
    axis: TensorAxis,
    experts: ExpertAxis,
    context: ContextAxis,
) -> Layer:
    """Return a layer's configuration; ``module``.

    Its transformers module, with a few more factors.
    """
    spec, plan = file.model, file.plan
    axis = replace(axis, fp8=file.workload.precision == "fp8")
    attention: Any = module.get_submodule(family.attention_block.name)
    width = kind.attention.head_dim
    core = AttentionCore(
        axis=axis,
        kernel=file.workload.attention_kernel,
        scaling=getattr(attention, "scaling", width**-0.5),
        window=kind.attention.window,
        dropout=spec.attention_dropout,
        softmax_in_fp32=family.softmax_in_fp32,
        cap=getattr(attention, "attn_logit_softcapping", None),
        recompute=CORE in modules_of(plan.recompute),
        context=context,
        causal=kind.attention.causal,
        isolated_dropout=plan.recompute in BY_OPERATOR,
    )
    return Layer(
        family=family,
        kind=kind,
        axis=axis,
        experts=experts,
        core=core,
        dropout=spec.hidden_dropout,
        residual_multiplier=getattr(module, "residual_multiplier", 1.0),
        recompute=plan.recompute,
        random=spec.attention_dropout > 0 or spec.hidden_dropout > 0,
        offload=plan.offloads_activations,
    )
