"""Host work of torch's DTensor around a layer.

    python -m benchmarks.step_time.dtensor_operators

Clocks the forward and the backward pass of a Llama layer so small that the host's work is all there
is (the fastest of several), in operators: the forward pass of plain tensors has 73 (``python -m
benchmarks.step_time.count_operators``). The layer has plain tensors, or its matrices are cut over
two tensor-parallel ranks (``parallelize_module``, as in torchtitan), or its norms as well (sequence
parallelism). The group is a fake one, whose collectives cost nothing.

Prints how much a cut matrix adds: ``host.dtensor_operators_forward`` and ``…_backward`` of
``hardware_profiles/software/trainers/torch-trainer.toml``.
"""

from __future__ import annotations

import time
from typing import Any, Final

from hardware_profiles.software.trainer import software_profile

WIDTH: Final = 16
TOKENS: Final = 8
STEPS: Final = 40
COLUMNS: Final = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
ROWS: Final = ("attention.output", "mlp.down")


def pass_seconds(cut: str, num_layers: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles
    from torch.nn.functional import scaled_dot_product_attention, silu

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key", "value", "output"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

        def forward(self, hidden: Any, angles: Any) -> Any:
            parts = (each(hidden) for each in (self.query, self.key, self.value))
            query, key, value = (x.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for x in parts)
            mixed = scaled_dot_product_attention(
                self.rotated(query, angles), self.rotated(key, angles), value, is_causal=True
            )
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
    sequence = cut == "norms too"
    if cut != "nothing":
        summed = {"output_layouts": Shard(1)} if sequence else {}
        plan: dict[str, Any] = {name: styles.ColwiseParallel() for name in COLUMNS}
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
        for layer in layers:
            styles.parallelize_module(layer, mesh, plan)
    angles = torch.ones(2, TOKENS, WIDTH // 4)
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
    """Return the operators of a layer's passes, by what is cut."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = {}
    for cut in ("nothing", "matrices", "norms too"):
        few, many = pass_seconds(cut, 2), pass_seconds(cut, 6)
        found[cut] = [(b - a) / 4 for a, b in zip(few, many, strict=True)]
    distributed.destroy_process_group()
    counted = software_profile("shardplan").host.layer_operators_forward
    one = found["nothing"][0] / counted
    return {cut: [seconds / one for seconds in passes] for cut, passes in found.items()}


def main() -> None:
    """Print a line for each way to cut a layer."""
    found = clocked()
    plain = found.pop("nothing")
    print("layer with plain tensors: forward {:.0f}, backward {:.0f} operators".format(*plain))
    for cut, passes in found.items():
        more = [(x - y) / len(COLUMNS + ROWS) for x, y in zip(passes, plain, strict=True)]
        print(f"{cut} cut: {more[0]:.0f} forward and {more[1]:.0f} backward more a matrix")


if __name__ == "__main__":
    main()
