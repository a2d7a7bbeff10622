"""Tensors that methods train beside a frozen matrix, and what they keep, by modules of torch."""

from collections.abc import Callable
from typing import Any, Final, get_args

import pytest
import torch
from torch import Tensor, nn

import planner
from cost_models.activations.live import layer_bytes
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.adapter_methods import METHODS, nearest_factors
from cost_models.model.lora import adapted, without_adapters
from cost_models.model.spec import ModelSpec
from cost_models.partition.frozen_weights import dequantisation_buffers, kept_unpacked_bytes
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import AdapterMethod, Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.samples import sample_model

RANK: Final = 4
TOKENS: Final = 24


class Adapted(nn.Module):
    """A frozen matrix and the tensors of a method, as its paper multiplies them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)

    def tensor(self, name: str, *shape: int) -> nn.Parameter:
        """Add a trained tensor."""
        self.register_parameter(name, nn.Parameter(torch.randn(*shape)))
        return getattr(self, name)


class Lora(Adapted):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.a, self.b = self.tensor("x", RANK, inputs), self.tensor("y", outputs, RANK)

    def added(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.added(x)


class Dora(Lora):
    """Liu et al., arXiv:2402.09353, eq. 5; the norm is a constant (sec. 4.3)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.m = self.tensor("magnitude", outputs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = (self.base.weight + self.b @ self.a).norm(dim=1)
        scale, base = self.m / norm, self.base(x)
        return base + (scale - 1) * base + scale * self.added(x)


class AdaLora(Lora):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.e = self.tensor("values", RANK, 1)

    def added(self, x: Tensor) -> Tensor:
        return x @ (self.a * self.e).T @ self.b.T


class Loha(Adapted):
    """Hyeon-Woo et al., arXiv:2108.06098, eq. 2: only the result is kept, factors give the rest."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.left = [self.tensor(name, outputs, RANK) for name in ("a", "c")]
        self.right = [self.tensor(name, RANK, inputs) for name in ("b", "d")]

    def forward(self, x: Tensor) -> Tensor:
        def made(*parts: Tensor) -> Tensor:
            return (parts[0] @ parts[2]) * (parts[1] @ parts[3])

        delta = torch.utils.checkpoint.checkpoint(
            made, *self.left, *self.right, use_reentrant=False
        )
        return self.base(x) + x @ delta.T


class Lokr(Adapted):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        (o, out), (i, inner) = nearest_factors(outputs), nearest_factors(inputs)
        self.w = self.tensor("w1", o, i)
        self.a, self.b = self.tensor("w2_a", out, RANK), self.tensor("w2_b", RANK, inner)

    def forward(self, x: Tensor) -> Tensor:
        delta = torch.utils.checkpoint.checkpoint(
            lambda w, a, b: torch.kron(w, a @ b), self.w, self.a, self.b, use_reentrant=False
        )
        return self.base(x) + x @ delta.T


class Vera(Adapted):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.d, self.b = self.tensor("d", RANK), self.tensor("b", outputs)
        self.register_buffer("shared_a", torch.randn(RANK, inputs))
        self.register_buffer("shared_b", torch.randn(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.d * (x @ self.shared_a.T)
        return self.base(x) + self.b * (inner @ self.shared_b.T)


class Ia3(Adapted):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.factor = self.tensor("l", outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.factor


class Ia3OfInputs(Ia3):
    """Before the last matrix of an MLP."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.factor = self.tensor("l", inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x * self.factor)


MODULES: Final[dict[str, Callable[[int, int], Adapted]]] = {
    "lora": Lora,
    "dora": Dora,
    "adalora": AdaLora,
    "loha": Loha,
    "lokr": Lokr,
    "vera": Vera,
    "ia3": Ia3,
    "ia3_of_inputs": Ia3OfInputs,
}
ASKED: Final = [name for name in MODULES if name in get_args(AdapterMethod)]


def with_method(method: AdapterMethod, **options: Any) -> tuple[ModelSpec, Workload]:
    values = {"adapter": "lora", "adapter_rank": RANK, "adapter_method": method, **options}
    workload = Workload(128, 1, master_weights=False, **values)
    return adapted(sample_model("llama"), workload), workload


def scenario_with(method: AdapterMethod, software: str = "hf-trainer", **options: Any) -> Scenario:
    model, workload = with_method(method, **options)
    return Scenario(model, parse_cluster("1xA100-80GB"), workload, software_profile(software))


@pytest.mark.parametrize("method", ASKED)
def test_trained_parameters_are_those_of_the_modules(method: AdapterMethod) -> None:
    model, _ = with_method(method)
    expected = 0
    for index in model.pattern:
        for weight in (w for w in model.kinds[index].weights if w.adapter):
            module = MODULES[weight.adapter](*weight.features)
            expected += sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert model.num_trainable_parameters == expected
    base = sample_model("llama")
    assert without_adapters(model).kinds == base.kinds


def saved(module: Adapted, inputs: int) -> tuple[int, bool]:
    """Elements that a forward pass keeps besides parameters and input; whether it keeps that."""
    own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
    hidden = torch.randn(TOKENS, inputs, requires_grad=True) * 1.0
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(hidden)
    kept = found.pop(hidden.untyped_storage().data_ptr(), None)
    return sum(t.untyped_storage().size() // 4 for t in found.values()), kept is not None


@pytest.mark.parametrize("method", MODULES)
def test_kept_tensors_are_those_of_the_modules(method: str) -> None:
    rule, (i, o) = METHODS[method], (96, 160)
    elements, keeps_input = saved(MODULES[method](i, o), i)
    expected = TOKENS * o * (rule.kept_outputs + rule.kept_results) + rule.composed * i * o
    assert keeps_input is rule.reads_input
    small = TOKENS * RANK + 2 * o + RANK * (i + o)  # of the rank, and factors of vectors
    assert expected <= elements <= expected + small


def test_every_method_has_a_line() -> None:
    others = {method.of_last for method in METHODS.values()} - {""}
    assert set(METHODS) - others == set(get_args(AdapterMethod))
    model, _ = with_method("oft", adapter_rank=8)
    (weight,) = [w for w in model.kinds[0].weights if w.adapter][:1]
    blocks = next(w for w in model.kinds[0].weights if w.name.endswith(".oft_R.weight"))
    # Qiu et al., arXiv:2306.07280: skew-symmetric blocks of 8 of the input
    assert blocks.numel == weight.features[0] // 8 * (8 * 7 // 2)


def test_blocks_of_one_input_train_nothing() -> None:
    with pytest.raises(InputError, match="adapter_rank = 1: oft has nothing to train"):
        with_method("oft", adapter_rank=1)


def test_vera_shares_its_matrices() -> None:
    """Kopiczko et al., arXiv:2310.11454, sec. 3.1: one pair for all layers."""
    model, _ = with_method("vera")
    base = sample_model("llama")
    longest = [
        max(sizes)
        for sizes in zip(*(w.features for w in model.kinds[0].weights if w.adapter), strict=True)
    ]
    frozen = model.num_parameters - model.num_trainable_parameters - base.num_parameters
    assert frozen == RANK * sum(longest)


def layer_of(scenario: Scenario) -> float:
    plan = Plan()
    rank = pipeline_rank(scenario, plan, default_layer_ranges(scenario, plan), 0)
    size = layer_bytes(RankView(scenario, PlanTable.from_plans([plan]), rank))
    return float(size[0])  # type: ignore[index]


def test_activations_of_methods() -> None:
    sizes = {name: layer_of(scenario_with(name)) for name in get_args(AdapterMethod)}
    assert sizes["dora"] > sizes["lora"] == sizes["adalora"] > sizes["ia3"]
    model = sample_model("llama")
    outputs = sum(
        w.features[1]
        for w in adapted(model, scenario_with("dora").workload).kinds[0].weights
        if w.adapter
    )
    more = (sizes["dora"] - sizes["lora"]) / model.num_layers
    assert more == pytest.approx(128 * 2 * 2.0 * outputs)  # two results in 16 bits
    fp32 = layer_of(scenario_with("dora", "peft")) - layer_of(scenario_with("lora", "peft"))
    assert fp32 / model.num_layers == pytest.approx(128 * (2.0 + 4.0) * outputs)


def test_composed_matrices_are_kept_and_multiplied() -> None:
    table = PlanTable.from_plans([Plan(), Plan(recompute="full")])
    lora, loha = (scenario_with(name) for name in ("lora", "loha"))
    matrices = [w for w in loha.model.kinds[0].weights if w.adapter]
    layers, numel = lora.model.num_layers, sum(w.numel for w in matrices)
    flops = [hardware_flops_per_step(s.model, s.workload, table)[0] for s in (lora, loha)]  # type: ignore[index]
    tokens = 128.0
    factors = 3 * sum(w.numel for w in lora.model.kinds[0].weights if w.is_adapter)
    # forward, input and weight gradients of a matrix as large, in place of LoRA's two
    expected = 2.0 * tokens * layers * (3 * numel - factors)
    assert flops[1] - flops[0] == pytest.approx(expected, rel=0.02)
    largest = max(w.numel for w in matrices)
    rank = pipeline_rank(loha, Plan(), default_layer_ranges(loha, Plan()), 0)
    view = RankView(loha, table, rank)
    assert list(dequantisation_buffers(view)[0]) == [2.0 * (numel + 2 * largest)] * 2
    assert list(kept_unpacked_bytes(view)) == [2.0 * (layers - 1) * numel, 0.0]
    peaks = [price(s, table).memory.allocated for s in (lora, loha)]
    more, again = peaks[1][0] - peaks[0][0], peaks[1][1] - peaks[0][1]  # type: ignore[index]
    assert more - again > 2.0 * (layers - 2) * numel


def test_methods_are_options() -> None:
    options: dict[str, Any] = {"seq_len": 512, "software": "hf-trainer"}
    lora, dora = (
        planner.fit("llama-3.2-1b", "1xA100-80GB", qlora=16, adapter_method=name, **options)
        for name in ("lora", "dora")
    )
    assert dora.assessment.memory.peak_bytes > lora.assessment.memory.peak_bytes
    assert dora.assessment.time.step_seconds > lora.assessment.time.step_seconds
    assert "--adapter-method dora" in dora.text()
    assert "(dora, qlora, rank 16)" in dora.text()
    with pytest.raises(InputError, match="adapter-method belong to"):
        planner.fit("llama-3.2-1b", "1xA100-80GB", adapter_method="dora", **options)
    with pytest.raises(InputError, match="adapter_method"):
        planner.fit("llama-3.2-1b", "1xA100-80GB", lora=8, adapter_method="x", **options)


@pytest.mark.parametrize(
    ("peft_type", "options"),
    [
        ("dora", {"use_dora": True}),
        ("loha", {}),
        ("lokr", {}),
        ("vera", {}),
        ("ia3", {}),
        ("oft", {"oft_block_size": 32, "r": 0}),
        ("adalora", {"init_r": RANK, "total_step": 10}),
    ],
)
def test_parameters_are_those_of_peft(peft_type: AdapterMethod, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    names = {"dora": "LoraConfig", "loha": "LoHaConfig", "lokr": "LoKrConfig", "vera": "VeraConfig"}
    names |= {"ia3": "IA3Config", "oft": "OFTConfig", "adalora": "AdaLoraConfig"}
    given: dict[str, Any] = {"target_modules": ["base"], **options}
    if peft_type == "ia3":
        given["feedforward_modules"] = []
    elif not {"r", "init_r"} & set(options):
        given["r"] = RANK
    module = peft.get_peft_model(Adapted(96, 160), getattr(peft, names[peft_type])(**given))
    rank = 32 if peft_type == "oft" else RANK
    shapes = METHODS[peft_type].tensors(96, 160, rank).values()
    expected = 0
    for shape in shapes:
        sizes = [{"i": 96, "o": 160}[n] if isinstance(n, str) else n for n in shape]
        expected += int(torch.tensor(sizes).prod())
    found = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert found == expected
