"""A loop with DeepSpeed: deepspeed train_deepspeed.py --deepspeed --deepspeed_config FILE."""

import argparse

import deepspeed
import torch
from toy_model import MICRO_BATCH, STEPS, model, rows

from planner.callbacks.accelerate import AcceleratePreflight

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
arguments = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend="gloo")
net = model()
engine, optimizer, _, _ = deepspeed.initialize(
    args=arguments, model=net, optimizer=torch.optim.AdamW(net.parameters())
)
with AcceleratePreflight(engine, optimizer, record="runs.csv"):
    for batch in rows().split(MICRO_BATCH)[:STEPS]:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
