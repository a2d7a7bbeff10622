"""Host work of torch's DTensor around a layer.

    python -m benchmarks.step_time.dtensor_operators

Clocks the forward and the backward pass of a Llama layer so small that the host's work is all there
is (the fastest of several, in several rounds). The layer has plain tensors, or its matrices are cut
over two tensor-parallel ranks (``parallelize_module``, as in torchtitan), or its norms as well
(sequence parallelism), or norms of each head, too, between which attention is on DTensors
(torchtitan's Qwen3). The group is a fake one, whose collectives cost nothing.

Prints how much a cut matrix adds, in milliseconds and in operators of a host with a GPU:
``host.dtensor_operators_forward`` and ``…_backward`` of
``hardware_profiles/software/trainers/torch-trainer.toml``. What DTensor adds is Python, which takes
as long without a GPU; a CPU's own operators are no measure of it, because they launch nothing (4.7
us on an EPYC instead of 8). Clock it while nothing else runs.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from hardware_profiles.software.trainer import software_profile

WIDTH: Final = 16
TOKENS: Final = 8
STEPS: Final = 40
ROUNDS: Final = 4
COLUMNS: Final = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
ROWS: Final = ("attention.output", "mlp.down")
NORMS: Final = ("query_norm", "key_norm")
CUTS: Final = ("nothing", "matrices", "norms too", "norms of heads too")


def pass_seconds(cut: str, num_layers: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel as styles
    from torch.nn.functional import scaled_dot_product_attention, silu

    of_heads = cut == "norms of heads too"

    class Core(nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value", "output"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
            for name in NORMS if of_heads else ():
                setattr(self, name, nn.RMSNorm(WIDTH // 2))
            self.core = Core()

        def forward(self, hidden: Any, angles: Any) -> Any:
            parts = (each(hidden) for each in (self.query, self.key, self.value))
            query, key, value = (x.unflatten(-1, (-1, WIDTH // 2)) for x in parts)
            if of_heads:
                query, key = self.query_norm(query), self.key_norm(key)
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            mixed = self.core(self.rotated(query, angles), self.rotated(key, angles), value)
            return self.output(mixed.transpose(1, 2).flatten(2))

        @staticmethod
        def rotated(x: Any, angles: Any) -> Any:
            one, two = x.float().chunk(2, -1)
            cosine, sine = angles
            turned = (one * cosine - two * sine, one * sine + two * cosine)
            return torch.cat(turned, -1).type_as(x)

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, hidden: Any) -> Any:
            return self.down(silu(self.gate(hidden)) * self.up(hidden))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.attention, self.mlp = Attention(), FeedForward()

        def forward(self, hidden: Any, angles: Any) -> Any:
            hidden = hidden + self.attention(self.norms[0](hidden), angles)
            return hidden + self.mlp(self.norms[1](hidden))

    layers = nn.ModuleList(Layer() for _ in range(num_layers))
    sequence = cut in ("norms too", "norms of heads too")
    angles = list(torch.ones(2, TOKENS, WIDTH // 4))
    if cut != "nothing":
        summed = {"output_layouts": Shard(1)} if sequence else {}
        plan: dict[str, Any] = {
            name: styles.ColwiseParallel(use_local_output="mlp" in name or not of_heads)
            for name in COLUMNS
        }
        plan |= {name: styles.RowwiseParallel(**summed) for name in ROWS}
        if sequence:
            plan |= {name: styles.SequenceParallel() for name in ("norms.0", "norms.1")}
            plan["attention"] = styles.PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            )
            plan["mlp"] = styles.PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        mesh = init_device_mesh("cpu", (2,))
        if of_heads:
            plan |= {f"attention.{name}": styles.SequenceParallel(sequence_dim=2) for name in NORMS}
            heads, out = (Shard(1),) * 3, (Shard(1),)
            plan["attention.core"] = styles.PrepareModuleInputOutput(
                input_layouts=heads,
                desired_input_layouts=heads,
                use_local_input=True,
                output_layouts=out,
                desired_output_layouts=out,
                use_local_output=False,
            )
            angles = [DTensor.from_local(each, mesh, [Replicate()]) for each in angles]
        for layer in layers:
            styles.parallelize_module(layer, mesh, plan)
    times = []
    for _ in range(STEPS):
        hidden = torch.zeros(1, TOKENS // (2 if sequence else 1), WIDTH, requires_grad=True)
        clock = [time.thread_time()]
        for layer in layers:
            hidden = layer(hidden, angles)
        clock.append(time.thread_time())
        hidden.sum().backward()
        clock.append(time.thread_time())
        times.append((clock[1] - clock[0], clock[2] - clock[1]))
        layers.zero_grad()
    ahead, back = (min(each) for each in zip(*times[5:], strict=True))
    return ahead, back


def clocked() -> dict[str, list[float]]:
    """Return the seconds of a layer's passes, by what is cut."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    rounds = [
        {(cut, layers): pass_seconds(cut, layers) for cut in CUTS for layers in (2, 6)}
        for _ in range(ROUNDS)
    ]
    distributed.destroy_process_group()
    found = {}
    for cut in CUTS:
        few, many = (np.min([each[cut, n] for each in rounds], axis=0) for n in (2, 6))
        found[cut] = [float(x) for x in (many - few) / 4]
    return found


def main() -> None:
    """Print a line for each way to cut a layer."""
    found, one = clocked(), software_profile("shardplan").host.operator_seconds
    plain = found.pop("nothing")
    print("layer with plain tensors: forward {:.2f} ms, backward {:.2f} ms".format(*_ms(plain)))
    for cut, passes in found.items():
        more = [(x - y) / len(COLUMNS + ROWS) for x, y in zip(passes, plain, strict=True)]
        words = "{:.2f} ms forward and {:.2f} ms backward more a matrix".format(*_ms(more))
        print(f"{cut} cut: {words} ({more[0] / one:.0f} and {more[1] / one:.0f} operators)")


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * x for x in seconds]


if __name__ == "__main__":
    main()
