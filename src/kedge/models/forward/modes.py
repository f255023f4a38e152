"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Evaluation mode (no dropout) inside of the block; afterwards, and after an error, the mode it had before.

    >>> layer = nn.Dropout().train()
    >>> with evaluating(layer):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
