"""Descriptions of a live ``nn.Module``: its model, adapters, sharding, optimizer and batch.

Nothing is moved and nothing runs. These modules import torch: whoever has a module has loaded it.
"""
