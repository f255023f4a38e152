"""Settings: frozen pydantic sections that reject unknown keys. A section lives next to the code that reads it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One group of settings. Each field has a range and a docstring below it; class defaults are recommended."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )
