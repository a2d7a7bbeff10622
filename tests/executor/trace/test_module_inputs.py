"""Arguments of a traced module: given shapes, a function, a guess."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification

from executor.trace.module_factory import load_factory, one_line
from executor.trace.module_inputs import inputs_of, parse_input_shape
from hardware_profiles.errors import InputError


def net() -> nn.Module:
    return nn.Linear(2, 2)


def test_typed_shapes_win():
    inputs, notes = inputs_of(net, net(), ["x=float32[B, 3, 8]", "y=int64[B]"])
    found = inputs(5)
    assert (found["x"].shape, found["x"].dtype) == ((5, 3, 8), torch.float32)
    assert (found["y"].shape, found["y"].dtype) == ((5,), torch.int64)
    assert notes == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float32[B,3]", "must be like"),
        ("x=float32", "must be like"),
        ("x=float8[B]", "float8 .must be one of float64"),
        ("x=int64[3]", "no size is B"),
        ("x=int64[B,-1]", "size '-1'"),
        ("x=int64[B,b]", "size 'b'"),
    ],
)
def test_what_is_no_shape(text: str, message: str):
    with pytest.raises(InputError, match=message):
        parse_input_shape(text)


def test_a_function_beside_the_factory(monkeypatch: pytest.MonkeyPatch):
    beside = ModuleType("beside")
    beside.example_inputs = lambda rows: {"x": torch.zeros(rows, 7)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "beside", beside)

    def factory() -> nn.Module:
        return nn.Linear(7, 1)

    factory.__module__ = "beside"
    inputs, _ = inputs_of(factory, factory(), [])
    assert inputs(3)["x"].shape == (3, 7)
    factory.example_inputs = lambda rows: torch.zeros(rows)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="returns Tensor"):
        inputs_of(factory, factory(), [])[0](3)


def test_hugging_face_modules_are_guessed_and_it_is_said():
    with torch.device("meta"):
        vit: Any = ViTForImageClassification(ViTConfig(num_hidden_layers=1, image_size=32))
        bert: Any = BertForMaskedLM(BertConfig(num_hidden_layers=1, max_position_embeddings=64))
    inputs, notes = inputs_of(net, vit, [])
    assert {k: tuple(v.shape) for k, v in inputs(2).items()} == {
        "pixel_values": (2, 3, 32, 32),
        "labels": (2,),
    }
    assert "a guess" in notes[0]
    inputs, _ = inputs_of(net, bert, [])
    assert {k: tuple(v.shape) for k, v in inputs(2).items()} == {
        "input_ids": (2, 64),
        "labels": (2, 64),
    }


def test_without_any_of_them_the_ways_are_named():
    with pytest.raises(InputError, match=r"--input .*example_inputs"):
        inputs_of(net, net(), [])


def test_a_factory_that_ends_python_is_refused() -> None:
    said = "module:sys:exit: ends Python instead of returning"
    with pytest.raises(InputError, match=said), one_line("module:sys:exit"):
        load_factory("module:sys:exit")()
