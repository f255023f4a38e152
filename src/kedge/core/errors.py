"""One tree of errors. A message says what was found, where, what was expected, and what to do.

Each class also inherits the fitting built-in, can be pickled, and knows the exit code of the command line:
1 failed, 2 bad input (nothing was changed), 3 stopped by a contract with everything saved, 4 waiting for people.
Ctrl-C ends with 130. A process that ends because another one is gone ends with 76.
"""

from __future__ import annotations

from typing import ClassVar

from kedge.core.quoting import escaped


class KedgeError(Exception):
    """Base of everything that Kedge raises on purpose. What a message quotes of others is shown, never obeyed."""

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(escaped(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(KedgeError, ValueError):
    """A recipe, a setting or a command-line argument is wrong."""

    exit_code = 2


class PluginError(KedgeError, LookupError):
    """A part was asked for that is not installed, or that cannot be imported."""

    exit_code = 2


class DataError(KedgeError, ValueError):
    """A data file is missing, unreadable, or unfit for what it is asked to do."""

    exit_code = 2


class ModelError(KedgeError, ValueError):
    """A model or tokenizer is missing, incomplete, or unfit for what it is asked to do."""

    exit_code = 2


class ShapeError(KedgeError, ValueError):
    """Tensors that must agree in shape or type do not."""


class NumericsError(KedgeError, ArithmeticError):
    """A number that must be finite is not."""


class CheckpointError(KedgeError, OSError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class RunError(KedgeError, OSError):
    """A run folder cannot be created, locked, read or written."""


class RewardError(KedgeError, RuntimeError):
    """A reward source is broken, or fails too often to learn from."""


class GeneratorError(KedgeError, RuntimeError):
    """Who samples the answers is gone, refuses, or answers what cannot be used."""


class SyncError(GeneratorError):
    """The weights that sample are not those that learn."""


class MisledError(SyncError):
    """The policy has learnt from answers of other weights than its own: it must not be saved."""


class ContractStop(KedgeError, RuntimeError):
    """A contract of the recipe (a KL limit, a gate) stopped the run; everything is saved."""

    exit_code = 3


class Waiting(KedgeError, RuntimeError):
    """A run cannot go on before people have done their part; everything is saved, and it is resumed when they have."""

    exit_code = 4


class ProcessError(KedgeError, RuntimeError):
    """Processes that run together have come apart: one hangs, or computes something else than the others."""


class ProcessLost(KedgeError, ConnectionError):
    """Another process of the run is gone; this one ends because it cannot go on without."""

    exit_code = 76


class GroupLost(KedgeError, ConnectionError):
    """A process of a group that holds roles is gone; the group is started again from the last checkpoint."""

    def __init__(self, group: str, rank: int, words: str, host: str = "") -> None:
        super().__init__(f"process {rank} of group {group} was lost ({words})")
        self.group, self.rank, self.words, self.host = group, rank, words, host

    def __reduce__(self) -> tuple[type[GroupLost], tuple[str, int, str, str]]:
        return type(self), (self.group, self.rank, self.words, self.host)
