"""A loop with Accelerate: accelerate launch --config_file accelerate.yaml train_accelerate.py.

With ``fsdp`` as argument the ranks of gloo are presented as accelerators: Accelerate 1.15 has no
FSDP for processes on CPUs (``AcceleratorState``, src/accelerate/state.py).
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from toy_model import MICRO_BATCH, model, rows

from planner.callbacks.accelerate import AcceleratePreflight

if "fsdp" in sys.argv:
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
accelerator = Accelerator()
net = model()
optimizer = torch.optim.AdamW(net.parameters())
loader = torch.utils.data.DataLoader(rows(), batch_size=MICRO_BATCH)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
with AcceleratePreflight(net, optimizer, accelerator=accelerator, record="runs.csv"):
    for batch in loader:
        accelerator.backward(net(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(type(net).__name__)
accelerator.end_training()
