"""A training loop that is checked before its first step, and recorded in runs.csv.

python examples/check_first.py [CLUSTER]     (default: here)
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner
from planner.callbacks.accelerate import AcceleratePreflight

cluster = sys.argv[1] if len(sys.argv) > 1 else "here"
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# before: nothing is moved or run
print(planner.check(model, optimizer=optimizer, inputs=(4, 128), cluster=cluster))
print(planner.estimate_memory(model, optimizer=optimizer, inputs=(4, 128), cluster=cluster).table)

# during and after: three lines before the first step, one row behind the last
with AcceleratePreflight(model, optimizer, record="runs.csv", cluster=cluster):
    for _ in range(8):
        tokens = torch.randint(0, 256, (4, 128))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
