"""Private and renamed names of torch and transformers that the executor relies on."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.plan.plan import Plan
from executor import compat
from executor.processes.fork import run_forked
from hardware_profiles.fields import names_in
from tests.executor.tiny import CONFIGS, tiny


def test_collectives_take_what_we_give_them():
    for function, names in (
        (compat.all_gather, ["output_tensor", "input_tensor"]),
        (compat.reduce_scatter, ["output", "input"]),
    ):
        parameters = list(inspect.signature(function).parameters)
        assert parameters[:2] == names
        assert {"group", "async_op"} <= set(parameters)


def test_all_to_all_takes_what_we_give_it():
    assert list(inspect.signature(compat.all_to_all).parameters)[:2] == ["output", "input"]


def test_the_delta_rule_takes_what_we_give_it():
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    rule = inspect.signature(module.torch_chunk_gated_delta_rule).parameters
    assert list(rule)[:3] == ["query", "key", "value"]
    assert {"g", "beta", "use_qk_l2norm_in_kernel"} <= set(rule)
    convolution = inspect.signature(module.causal_conv1d_fn).parameters
    assert list(convolution)[:3] == ["hidden_states", "weight", "bias"]
    assert "activation" in convolution


def test_the_delta_rule_shares_key_heads_among_value_heads():
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 5, 2, 4, generator=random) for _ in range(2))
    value = torch.randn(2, 5, 6, 3, generator=random)
    decay, learning = (torch.rand(2, 5, 6, generator=random) for _ in range(2))
    options = {"use_qk_l2norm_in_kernel": True}
    found = compat.gated_delta_rule(query, key, value, g=-decay, beta=learning, **options)[0]
    for head in range(6):
        of_key, of_value = slice(head // 3, head // 3 + 1), slice(head, head + 1)
        alone = compat.gated_delta_rule(
            query[:, :, of_key],
            key[:, :, of_key],
            value[:, :, of_value],
            g=-decay[:, :, of_value],
            beta=learning[:, :, of_value],
            **options,
        )[0]
        torch.testing.assert_close(found[:, :, of_value], alone)


# arguments of the attention kernels in the order in which we give them, the named ones last
KERNELS = {
    "cpu_attention": "query key value dropout_p is_causal attn_mask scale",
    "cpu_attention_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
    ),
    "cuda_flash": "query key value dropout_p is_causal return_debug_mask scale",
    "cuda_flash_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal philox_seed philox_offset scale"
    ),
    "cuda_masked": "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    "cuda_masked_backward": (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
        "grad_input_mask is_causal scale"
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernels_take_what_we_give_them(name: str):
    schema = getattr(compat, name).default._schema
    assert [argument.name for argument in schema.arguments] == KERNELS[name].split()
    if not name.endswith("backward"):
        assert [result.name.replace("_", "") for result in schema.returns][:2] == [
            "output",
            "logsumexp",
        ]


def test_many_tensors_are_multiplied_in_place():
    tensors = [torch.ones(2), torch.ones(3, 1), torch.ones(0)]
    compat.foreach_multiply_(tensors, torch.tensor(0.5))
    assert [float(t.sum()) for t in tensors] == [1.0, 1.5, 0.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_is_skipped_on_demand(kind):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, fused=True)
    for spoiled in (False, True, False):
        before = weight.detach().clone()
        states = [value.clone() for value in optimizer.state[weight].values() if value is not None]
        weight.grad = torch.full((3,), float("nan") if spoiled else 1.0)
        compat.set_fused_step_inputs(optimizer, torch.tensor(spoiled), None)
        optimizer.step()
        assert torch.equal(weight.detach(), before) == spoiled
        if spoiled:
            kept = [value for value in optimizer.state[weight].values() if value is not None]
            assert all(map(torch.equal, states, kept))
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_multiplies_the_gradients(kind):
    found = []
    for factor in (None, torch.tensor(0.25)):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1, fused=True)
        weight.grad = torch.tensor([1.0, -2.0, 3.0]) * (0.25 if factor is None else 1.0)
        compat.set_fused_step_inputs(optimizer, None, factor)
        optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones(3))


def test_a_backward_pass_knows_that_it_is_one():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(compat.in_backward()))
    seen.append(compat.in_backward())
    y.backward()
    assert seen == [False, True]


def test_replicate_takes_a_mesh_and_a_policy():
    assert {"mesh", "mp_policy"} <= set(inspect.signature(compat.replicate).parameters)


def test_fsdp_has_the_switches_that_we_set():
    for name in names_in("""
        set_gradient_divide_factor set_force_sum_reduction_for_comms set_is_last_backward
        set_modules_to_backward_prefetch set_requires_all_reduce set_requires_gradient_sync
        set_reshard_after_backward set_unshard_in_backward
    """):
        assert callable(getattr(FSDPModule, name))


def test_every_family_builds_without_memory_and_without_words(recwarn, capsys):
    for family in CONFIGS:
        config = tiny(Plan(), family).model.config
        model = compat.causal_lm(
            config, device="meta", dtype=torch.float32, attention_kernel="flash"
        )
        assert model.training
        assert all(p.is_meta for p in model.parameters())
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")


class _Aliasing(TorchDispatchMode):  # type: ignore[misc]
    """Keeps an alias of what every exponential gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.exp.default:
            self.kept.append(compat.alias_below_autograd(found))
        return found


def test_an_alias_below_autograd_sees_changes_in_place():
    with _Aliasing() as mode:
        y = torch.ones(2, requires_grad=True).exp()
        before = compat.version_of(mode.kept[0])
        y.add_(1.0)
    assert compat.version_of(mode.kept[0]) == before + 1
    assert mode.kept[0].data_ptr() == y.data_ptr()
    assert not mode.kept[0].requires_grad


def test_kept_operators_are_overloads():
    assert len(compat.KEPT_OPERATORS) == 6
    assert torch.ops.aten.mm.default in compat.KEPT_OPERATORS


def test_rotary_positions_turn_pairs():
    q = torch.randn(1, 3, 2, 4)
    angle = torch.tensor([0.0, 0.5, 1.0])[None, :, None].expand(1, 3, 4)
    turned, _ = compat.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(turned[:, 0], q[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def test_rotary_positions_turn_neighbours():
    q = torch.randn(1, 3, 2, 6)
    angle = torch.tensor([0.0, 0.5, 1.0])[None, :, None].expand(1, 3, 4)
    part, _ = compat.rotate_adjacent(q, q, angle.cos(), angle.sin(), unsqueeze_dim=2)
    whole, _ = compat.rotate_in_fp32(
        q[..., :4], q[..., :4], angle.cos(), angle.sin(), unsqueeze_dim=2
    )
    torch.testing.assert_close(part[..., 4:], q[..., 4:])
    torch.testing.assert_close(part[..., :4], whole)
    pair = torch.complex(q[..., 0], q[..., 1]) * torch.exp(1j * angle[..., :1])
    torch.testing.assert_close(part[..., :2], torch.view_as_real(pair))
    narrow, _ = compat.rotate_in_fp32(
        q.bfloat16()[..., :4], q[..., :4], angle.cos(), angle.sin(), unsqueeze_dim=2
    )
    assert narrow.dtype == torch.bfloat16


def _groups_after_a_backward_pass(rank: int) -> list[bool]:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in (*layers, layers):
        torch.distributed.fsdp.fully_shard(module, mesh=mesh)
    layers.set_requires_gradient_sync(False)
    layers.set_is_last_backward(False)
    layers(torch.ones(1, 2)).sum().backward()
    last, first = compat.parameter_groups(layers)
    is_backward_order = last.whole[0] is not first.whole[0]
    taken = {id(parameter): gradient for parameter, gradient in last.take()}
    given = [bool((taken[id(p)] != 0).all()) for p in last.whole]
    forgotten = all(p.grad is None for p in last.whole)
    for parameter in last.whole:
        parameter.grad = taken[id(parameter)]
    layers.set_requires_gradient_sync(True)
    layers.set_is_last_backward(True)
    for group in (last, first):
        group.end()
    compat.end_backward(layers)
    reduced = all(p.grad is not None for p in layers.parameters())
    return [is_backward_order, *given, forgotten, reduced]


@pytest.mark.distributed
def test_groups_of_parameters_are_reduced_on_demand():
    assert all(map(all, run_forked(_groups_after_a_backward_pass, 2)))


def test_collectives_and_waits_can_be_watched():
    methods = set(vars(torch.distributed.ProcessGroup)) & set(compat.COLLECTIVE_METHODS)
    kinds = {compat.COLLECTIVE_METHODS[name] for name in methods}
    assert kinds == set(compat.COLLECTIVE_METHODS.values())  # by one name or another
    before = {name: vars(torch.distributed.ProcessGroup)[name] for name in methods}
    wait = vars(torch.distributed.Work)["wait"]
    with compat.observing_collectives(lambda *_: None, lambda _: None):
        assert vars(torch.distributed.Work)["wait"] is not wait
    assert vars(torch.distributed.Work)["wait"] is wait
    assert before == {name: vars(torch.distributed.ProcessGroup)[name] for name in methods}


def test_fake_tensors_have_sizes_and_no_values():
    with compat.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        made = torch.zeros(3, 4)
        with compat.unset_fake_temporarily():
            real = torch.ones(2)
        taken = fake.from_tensor(real)
    assert isinstance(made, compat.FakeTensor)
    assert isinstance(taken, compat.FakeTensor)
    assert not isinstance(real, compat.FakeTensor)
    assert made.untyped_storage().nbytes() == 48
    with pytest.raises(Exception, match="_local_scalar_dense"), fake:
        made.sum().item()
