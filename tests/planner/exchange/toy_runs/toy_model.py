"""A Llama of 1.6 M parameters, random tokens, and folders as exported scripts expect them."""

import json
from pathlib import Path
from typing import Any

import torch

MODEL = Path(__file__).parents[4] / "examples" / "tiny-llama"
SEQ_LEN, MICRO_BATCH, RANKS, STEPS = 128, 4, 2, 10


def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))


def rows() -> torch.Tensor:
    """Return token rows for all steps of all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (STEPS * MICRO_BATCH * RANKS, SEQ_LEN), generator=generator)


def save_model(folder: Path) -> None:
    """Save weights and config, as ``from_pretrained`` reads them."""
    model().save_pretrained(folder)


def save_rows(folder: Path) -> None:
    """Save the rows as a tokenized data set, as ``load_from_disk`` reads it."""
    import datasets

    tokens = rows().tolist()
    found = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    found.save_to_disk(str(folder))


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:254], "<s>", "</s>"]
    made = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
