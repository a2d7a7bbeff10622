"""Bounded types of options."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=10**7)]
Natural = Annotated[int, Meta(ge=0, le=2**31)]
Rate = Annotated[float, Meta(ge=0.0)]
Positive = Annotated[float, Meta(gt=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Meta(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Meta(ge=1.0)]
