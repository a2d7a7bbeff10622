"""Host work of Megatron's experts that grows with their number, in addition to the kernels.

    python -m benchmarks.step_time.expert_weights

Transformer Engine's GroupedLinear keeps a matrix and an empty bias for each expert, and does in
Python for each of them: both are looked up, cast if needed, passed to autograd and saved in the
forward pass; in the backward pass they are restored, the matrix's buffer of gradients is looked up,
the input's memory released, and a stand-in for the gradient made, which autograd accumulates and
hands to the hook of Megatron's DistributedDataParallel (transformer_engine/pytorch/module/
grouped_linear.py; megatron/core/distributed/distributed_data_parallel.py). Clocks a function of
torch that does so without kernels, with few and with many experts, and a layer of Llama whose
forward pass stands for ``host.layer_operators_forward`` operators of Megatron-LM.

Prints how many operators an expert adds in each pass with its two matrices: most of
``host.expert_operators_forward`` and ``..._backward`` of megatron.toml.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from hardware_profiles.software.trainer import software_profile

FEW, MANY, STEPS, ROUNDS, WIDTH = 8, 72, 200, 3, 8
MATRICES: Final = 2  # of an expert: gate and up are one


def grouped_seconds(experts: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass of one matrix of every expert."""
    import torch

    def cast(tensor: Any) -> Any:
        return tensor if tensor.dtype == torch.float32 else tensor.float()

    def plain(*tensors: Any) -> list[Any]:
        return [each for each in tensors if each is None or isinstance(each, torch.Tensor)]

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tokens: Any, splits: Any, *parameters: Any) -> Any:
            weights, biases = parameters[: len(splits)], parameters[len(splits) :]
            inputs = torch.split(tokens, splits)
            cast_weights, cast_biases = map(cast, weights), map(cast, biases)
            ctx.save_for_backward(*plain(*inputs, *cast_weights, *weights, *cast_biases))
            ctx.splits = splits
            ctx.buffers = [lambda weight=weight: weight.main_grad for weight in weights]
            return torch.empty_like(tokens)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            count, saved = len(ctx.splits), plain(*ctx.saved_tensors)
            inputs, weights = saved[:count], saved[2 * count : 3 * count]
            torch.split(gradients[0], ctx.splits)
            for weight, buffer in zip(weights, ctx.buffers, strict=True):
                weight.main_grad = buffer()
            for each in inputs:
                each.data = empty
            given = []
            for weight in weights:
                weight.grad_added_to_main_grad = True
                given.append(stand_in.detach())
            return torch.empty_like(gradients[0]), None, *given, *[None] * count

    def hook_of(weight: Any) -> Any:
        def hook(*unused: Any) -> None:
            if weight in trained:
                if weight.grad is not None and not weight.grad_added_to_main_grad:
                    weight.main_grad.add_(weight.grad)
                weight.grad = None
                ready.add(weight)

        return hook

    empty, stand_in = torch.empty(0), torch.empty(WIDTH, WIDTH)
    module: Any = torch.nn.Module()
    ready, accumulators = set(), []
    for number in range(experts):
        weight: Any = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(WIDTH, WIDTH), False
        setattr(module, f"weight{number}", weight)
        setattr(module, f"bias{number}", torch.empty(0))
        accumulators.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(hook_of(weight))
    trained = set(module.parameters())
    tokens = torch.zeros(experts, WIDTH, requires_grad=True)
    times = []
    for _ in range(STEPS):
        ready.clear()
        clock = [time.thread_time()]
        names = (f"{name}{number}" for name in ("weight", "bias") for number in range(experts))
        out = Grouped.apply(tokens, [1] * experts, *(getattr(module, name) for name in names))
        clock.append(time.thread_time())
        torch.autograd.backward(out, out.detach())
        clock.append(time.thread_time())
        assert len(ready) == experts
        times.append((clock[1] - clock[0], clock[2] - clock[1]))
    ahead, back = (float(np.min(each)) for each in zip(*times[5:], strict=True))
    return ahead, back


def layer_seconds(num_layers: int) -> float:
    """Return the seconds of a forward pass through layers of a Llama model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    config = LlamaConfig(num_hidden_layers=num_layers, **sizes, **heads)
    model: Any = LlamaForCausalLM(config).bfloat16().train()
    tokens, times = torch.zeros(1, 4, dtype=torch.int64), []
    for _ in range(STEPS // 5):
        begin = time.thread_time()
        model(input_ids=tokens)
        times.append(time.thread_time() - begin)
    return min(times[5:])


def clocked() -> tuple[float, float]:
    """Return the operators that an expert adds in a forward and in a backward pass."""
    import torch

    torch.set_num_threads(1)
    rounds = [
        (*grouped_seconds(FEW), *grouped_seconds(MANY), layer_seconds(2), layer_seconds(10))
        for _ in range(ROUNDS)
    ]
    ahead, back, more_ahead, more_back, two, ten = np.min(rounds, axis=0)
    operator = (ten - two) / 8 / software_profile("megatron").host.layer_operators_forward
    each = MATRICES / (MANY - FEW) / operator
    return float(each * (more_ahead - ahead)), float(each * (more_back - back))


def main() -> None:
    """Print the operators of an expert."""
    print("an expert adds {:.2f} operators forward and {:.2f} backward".format(*clocked()))


if __name__ == "__main__":
    main()
