"""What every section of the configuration is, and the kinds of values they share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent coercion of text to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def changed(self) -> set[str]:
        """Fields whose value is not their default. A resolved configuration names every field, so being named means nothing."""
        return {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default(call_default_factory=True)
        }
