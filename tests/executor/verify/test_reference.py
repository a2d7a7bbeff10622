"""Casts that modules make for the sake of 16 bits do not spoil float64."""

import torch
import torch.nn.functional as F

from executor.verify.reference import KeepFloat64


def test_float64_stays_and_others_are_cast():
    exact, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    with KeepFloat64():
        for cast in (
            exact.to(torch.float32),
            exact.to(dtype=torch.float32),
            exact.float(),
            exact.type(torch.float32),
            F.softmax(exact, dim=-1, dtype=torch.float32),
            exact.softmax(-1, dtype=torch.float32),
        ):
            assert cast.dtype == torch.float64
        assert exact.to(torch.bfloat16).dtype == torch.bfloat16
        assert narrow.float().dtype == narrow.to(torch.float32).dtype == torch.float32
        assert torch.arange(3).float().dtype == torch.float32
    assert exact.float().dtype == torch.float32
