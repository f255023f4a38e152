"""Which parameters of a model learn."""

from __future__ import annotations

from torch import nn


def trainable_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
