"""What the blocks of the schema are made of: frozen, no unknown keys, a few kinds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen block of keys; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
