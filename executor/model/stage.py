"""A pipeline stage: its Hugging Face modules, with the executor's forward pass.

The whole model is built on the meta device, the stage takes its parts, and every parameter is
replaced by this rank's slice of it, still without memory. Names stay those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.model.lora import BLOCK
from cost_models.model.spec import ModelSpec
from cost_models.partition.recomputed_layers import repeated_matrices
from cost_models.plan.recompute import EVERY_SECOND
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from executor.activity import ACTIVITY
from executor.attention.core import Documents
from executor.compat import causal_lm
from executor.data.batch import Batch
from executor.dtypes import COMPUTE_DTYPE, ParameterSlice, local_tensor, master_dtype
from executor.model.families import FAMILIES
from executor.model.families.decoder_layer import run_layer
from executor.model.families.description import Layer, RotaryTables
from executor.model.families.experts import prepare_experts
from executor.model.families.planned import planned_layer
from executor.model.loss import summed_cross_entropy
from executor.model.parameter_layout import (
    Initializer,
    ParameterLayout,
    Pieces,
    buffer_layouts,
    parameter_layouts,
    subrange,
)
from executor.model.shared_tensor_names import names_by_stage
from executor.ops.nf4 import PackedMatrix, num_blocks, pack
from executor.ops.soft_cap import soft_capped
from executor.parallel.context_parallel import SINGLE_RANK, ContextAxis
from executor.parallel.expert_parallel import ALL_EXPERTS, ExpertAxis
from executor.parallel.tensor_parallel import (
    UNSHARDED,
    TensorAxis,
    column_linear,
    vocabulary_embedding,
)

EXPERTS: Final = "experts"


class Stage(nn.Module):  # type: ignore[misc]
    """A slice of the model: tokens or a hidden state in, a hidden state or the summed loss out."""

    def __init__(
        self,
        file: PlanFile,
        index: int,
        axis: TensorAxis,
        experts: ExpertAxis = ALL_EXPERTS,
        context: ContextAxis = SINGLE_RANK,
    ) -> None:
        super().__init__()
        spec, workload = file.model, file.workload
        self.index = index
        self.first, self.last = index == 0, index == file.plan.num_stages - 1
        self.master = master_dtype(workload)
        self.axis, self.experts, self.family = axis, experts, FAMILIES[spec.family]
        whole = causal_lm(
            spec.config,
            device="meta",
            dtype=master_dtype(workload),
            attention_kernel=workload.attention_kernel,
        )
        first_layer, end_layer = file.layer_ranges[index]
        self.layer_names = list(spec.layer_prefixes[first_layer:end_layer])
        self.tokens = (
            self.family.tokens if self.first else ""
        )  # name of the embedding on this stage
        # copies of tensors that earlier stages hold too, and their names in the whole model
        self.copies = {
            names[index]: name
            for name, names in names_by_stage(file).items()
            if index in names and index != min(names)
        }
        self.rotary: Any = None
        config: Any = whole.config
        self.embedding_dropout = spec.embedding_dropout
        self.embedding_multiplier = self.family.embedding_multiplier(config)
        self.logits_multiplier = self.family.logits_multiplier(config)
        self.logits_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._take_parts(whole)
        self.rotary_tables: dict[str, str | None] = {}  # by layer
        recomputed = file.recomputed.of_stage(index, (first_layer, end_layer))
        for number, name in enumerate(self.layer_names, start=first_layer):
            module = self.get_submodule(name)
            kind = spec.kinds[spec.pattern[number]]
            layer = planned_layer(file, self.family, kind, module, axis, experts, context)
            if number not in recomputed:
                layer = without_recompute(layer)
            self._prepare_layer(name, layer)
        placed = parameter_layouts(spec, axis, experts)
        self._add_adapters(placed, workload)
        self._mark_matrices(spec, file.plan.recompute)
        self._cut_parameters(placed, spec, COMPUTE_DTYPE[workload.precision])

    def _prepare_layer(self, name: str, layer: Layer) -> None:
        module = self.get_submodule(name)
        prepare_experts(module.get_submodule(self.family.feed_forward_block.name), layer)
        module.forward = partial(run_layer, layer, module)
        table = self.family.rotary_table(module) if self.family.rotary else None
        self.rotary_tables[name] = table

    def _take_parts(self, whole: nn.Module) -> None:
        family = self.family
        names = list(self.layer_names)
        if self.first:
            names = family.embedding_modules + names
            embedding: Any = whole.get_submodule(family.embedding_modules[0])
            embedding.forward = self._embed
            if family.positions:
                table: Any = whole.get_submodule(family.positions)
                table.forward = partial(_look_up, table, family.position_offset)
        if self.last:
            names += family.head_modules
            head: Any = whole.get_submodule(family.head)
            head.forward = self._loss
            if family.head_bias:  # the same tensor under a second name
                whole.get_submodule(family.projection).bias = None
        for name in names:
            self._graft(name, whole.get_submodule(name))
        if family.rotary:
            self.rotary = whole.get_submodule(family.rotary)

    def _graft(self, name: str, module: nn.Module) -> None:
        """Register a module under its dotted name."""
        parent: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if not hasattr(parent, step):
                parent.add_module(step, nn.Module())
            parent = getattr(parent, step)
        parent.add_module(last, module)

    def _add_adapters(self, table: dict[str, ParameterLayout], workload: Workload) -> None:
        """Add the LoRA matrices of this stage's layers."""
        prefixes = tuple(f"{name}." for name in self.layer_names)
        dtype = master_dtype(workload)
        for name, layout in table.items():
            if layout.is_adapter and name.startswith(prefixes):
                path, small, _ = name.rsplit(".", 2)
                linear = self.get_submodule(path)
                add_adapter(linear, small, layout, workload, device="meta", dtype=dtype)

    def _mark_matrices(self, spec: ModelSpec, recompute: str) -> None:
        """Mark the modules whose matmul ``ops:every-2nd-mm`` computes again."""
        if recompute != EVERY_SECOND:
            return
        for name in self.layer_names:
            kind = spec.kinds[spec.pattern[spec.layer_prefixes.index(name)]]
            for weight in repeated_matrices(kind):
                linear = self.get_submodule(f"{name}.{weight.name.removesuffix('.weight')}")
                linear.runs_again = True

    def _cut_parameters(
        self, table: dict[str, ParameterLayout], spec: ModelSpec, compute: torch.dtype
    ) -> None:
        """Replace every parameter by this rank's slice of it, and record the layouts."""
        self.layouts: dict[str, ParameterLayout] = {}
        present = dict(self.named_buffers())  # every rank of the stage holds them
        self.buffer_layouts = {
            name: layout for name, layout in buffer_layouts(spec).items() if name in present
        }
        self.pieces: dict[str, Pieces] = {}  # of every parameter on this rank
        self.start, self.stop = self.axis.slice_of(spec.vocab_size)
        head, tokens = f"{self.family.projection}.weight", f"{self.tokens}.weight"
        for name, old in list(self.named_parameters(remove_duplicate=False)):
            if spec.tie_embeddings and self.tokens and name == head:
                continue
            layout = table[self.copies.get(name, name)]
            assert tuple(old.shape) == layout.shape, (name, old.shape, layout.shape)
            self.layouts[name] = layout
            shape = layout.local_shape(self.axis, self.experts)
            if layout.quantised:
                self._pack(name, layout, shape)
                continue
            dtype = compute if layout.frozen else old.dtype
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self._set(name, nn.Parameter(empty, requires_grad=not layout.frozen))
        if spec.tie_embeddings and self.tokens and self.last:
            self._set(head, self.get_parameter(tokens))

    def _pack(self, name: str, layout: ParameterLayout, shape: tuple[int, ...]) -> None:
        """Replace a matrix by its 4-bit codes and scales, without an unpacked copy."""
        linear: Any = self.get_submodule(name.rpartition(".")[0])
        linear.packed_shape = shape[::-1] if layout.transposed else shape
        count = num_blocks(shape)
        codes = torch.empty(count * BLOCK // 2, dtype=torch.uint8, device="meta")
        linear.weight = nn.Parameter(codes, requires_grad=False)
        scales = torch.empty(count, dtype=torch.float32, device="meta")
        linear.weight_scales = nn.Parameter(scales, requires_grad=False)

    def packed_matrix(self, name: str) -> PackedMatrix:
        """Return a matrix stored in 4 bits; (out, in)."""
        linear: Any = self.get_submodule(name.rpartition(".")[0])
        return PackedMatrix(linear.weight, linear.weight_scales, linear.packed_shape)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, last = name.rpartition(".")
        setattr(self.get_submodule(path), last, parameter)

    def expert_modules(self, subrange: nn.Module | None = None) -> list[nn.Module]:
        """Return the modules of routed experts, in forward order."""
        owner = subrange or self
        return [m for name, m in owner.named_modules() if name.split(".")[-1] == EXPERTS]

    def groups(self) -> Iterator[list[nn.Module]]:
        """Yield the modules that are gathered and reduced together, in forward order."""
        family = self.family
        outer = family.embedding_modules if self.first else []
        head = family.head_modules if self.last else []
        tied = (
            outer
            and head
            and self.get_parameter(f"{family.projection}.weight")
            is self.get_parameter(f"{family.tokens}.weight")
        )
        names = [outer + head if tied else outer]
        names += [[name] for name in self.layer_names]
        names += [] if tied else [head]
        return ([self.get_submodule(n) for n in group] for group in names if group)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers."""
        return [self.get_submodule(name) for name in self.layer_names]

    def materialise(
        self, device: torch.device, start: Initializer, data_slices: dict[str, ParameterSlice]
    ) -> None:
        """Allocate every parameter and write its initial values.

        ``data_slices``: this rank's part of its slice, where data ranks share it. The resulting
        pieces are recorded in ``pieces``.
        """
        tied = {id(p): name for name, p in self.named_parameters()}
        twins = [
            (name, tied[id(p)])
            for name, p in self.named_parameters(remove_duplicate=False)
            if tied[id(p)] != name
        ]
        self.to_empty(device=device)
        for name, original in twins:
            if self.get_parameter(name) is not self.get_parameter(original):
                self._set(name, self.get_parameter(original))
        if self.rotary is not None:  # its buffers are computed, not loaded
            self.rotary = type(self.rotary)(self.rotary.config).to(device)
        with torch.no_grad():
            for name, layout in self.buffer_layouts.items():
                self.get_buffer(name).copy_(start(layout, layout.ranges(UNSHARDED)))
            for name, layout in self.layouts.items():
                ACTIVITY.beat()  # heartbeat: a large model takes long to read
                local = local_tensor(self.get_parameter(name))
                pieces = layout.ranges(self.axis, self.experts)
                if name in data_slices:
                    dim, first, last = data_slices[name]
                    kept_rows = subrange(pieces[dim], first, last)
                    pieces = (*pieces[:dim], kept_rows, *pieces[dim + 1 :])
                self.pieces[name] = pieces
                if layout.quantised:
                    values = start(layout, pieces).to(device)
                    fresh = pack(values.t() if layout.transposed else values)
                    self.packed_matrix(name).codes.copy_(fresh.codes)
                    self.packed_matrix(name).scales.copy_(fresh.scales)
                else:
                    local.copy_(start(layout, pieces))

    def forward(self, batch: Batch, received: Tensor | None = None) -> Tensor:
        """Run the stage on a micro-batch; ``received``: the hidden state of the previous stage.

        The last stage returns the loss summed over its tokens.
        """
        causal = not self.family.masked
        documents = None if batch.starts is None else Documents(batch.starts, causal)
        if documents is not None:
            positions = documents.positions
        elif batch.places is not None:
            positions = batch.places[None]
        else:
            positions = torch.arange(batch.inputs.size(1), device=batch.inputs.device)[None]
        if documents is not None and batch.places is not None:
            positions = positions[:, batch.places]
        if received is None:
            entry = self.get_submodule(self.family.embedding_modules[0])
            hidden = entry(batch.inputs, positions)
        else:
            hidden = received
        rotary = self._rotary(hidden, positions)
        for name in self.layer_names:
            table = rotary[self.rotary_tables[name]]
            hidden = self.get_submodule(name)(hidden, table, documents)
        if not self.last:
            return hidden
        if self.family.norm:
            hidden = self.get_submodule(self.family.norm)(hidden)
        loss: Tensor = self.get_submodule(self.family.head)(hidden, batch.labels)
        return loss

    def _rotary(self, hidden: Tensor, positions: Tensor) -> dict[str | None, RotaryTables | None]:
        """Return cosine and sine of all positions by table: attention covers whole sequences."""
        tables: dict[str | None, RotaryTables | None] = {None: None}
        for name in dict.fromkeys(self.rotary_tables.values()):
            if name is not None:
                tables[name] = self.rotary(hidden, positions, *([name] if name else []))
        return tables

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        family, table = self.family, self.get_submodule(self.family.tokens)
        hidden = vocabulary_embedding(
            self.axis, tokens, table.weight, self.start, table.padding_idx
        )
        if family.token_types:
            hidden = hidden + self.get_submodule(family.token_types).weight[0]
        if self.family.positions:
            start, stop = self.axis.sequence_slice(tokens.size(1))
            hidden = hidden + self.get_submodule(self.family.positions)(positions[:, start:stop])
        if self.embedding_multiplier != 1.0:  # rounded to the precision of the hidden state
            hidden = hidden * hidden.new_tensor(self.embedding_multiplier)
        if family.embedding_norm:
            hidden = self.get_submodule(family.embedding_norm)(hidden)
        return self._dropped(hidden)

    def _dropped(self, hidden: Tensor) -> Tensor:
        if not self.embedding_dropout:
            return hidden
        return F.dropout(hidden, self.embedding_dropout, self.training)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        family, projection = self.family, self.get_submodule(self.family.projection)
        bias = self.get_parameter(family.head_bias) if family.head_bias else projection.bias
        if family.head_transform:
            hidden = self.get_submodule(family.head_transform)(hidden)
        if self.logits_multiplier != 1.0:  # before the matmul, where it is cheap
            hidden = hidden * self.logits_multiplier
        # never deferred: input and gradient of the projection are the largest tensors of all
        axis = replace(self.axis, defers_weights=False)
        (logits,) = column_linear(axis, hidden, [projection.weight], [bias])
        if self.logits_cap is not None:
            logits = soft_capped(logits, self.logits_cap)
        return summed_cross_entropy(self.axis, logits.flatten(0, 1), labels.flatten(), self.start)


def without_recompute(layer: Layer) -> Layer:
    """Return the layer without recomputation."""
    core = replace(layer.core, recompute=False)
    return replace(layer, core=core, recompute="none")


def _look_up(table: Any, offset: int, positions: Tensor) -> Tensor:
    return F.embedding(positions + offset, table.weight)


def add_adapter(
    linear: Any, small: str, layout: ParameterLayout, workload: Workload, **place: Any
) -> None:
    """Add one LoRA matrix, lora_A or lora_B, to a linear module."""
    outputs, inputs = layout.shape
    linear.add_module(small, nn.Linear(inputs, outputs, bias=False, **place))
    linear.lora_scale = workload.adapter_alpha / workload.adapter_rank
