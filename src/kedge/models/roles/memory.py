"""The memory of each role for weights, gradients and optimiser: the table that a run begins with.

Counted from the tensors themselves. Activations, the cache of generation and the allocator's overhead are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kedge.models.forward.parts import local
from kedge.models.training.train_step import TrainStep

_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    role: str
    shared_bytes: int
    """Weights that are counted for another role already."""
    own_bytes: int
    """Weights that only this role has."""
    learning_bytes: int
    """Gradients, moments, and float32 masters of weights in bfloat16, during a step."""
    learns: int
    """How many weights are trained."""
    host_bytes: int = 0
    """What is in host memory between its turns, and counted nowhere else here."""


def of_role(
    role: str,
    *,
    shared: Iterable[Tensor] = (),
    own: Iterable[Tensor] = (),
    train_step: TrainStep | None = None,
    is_moved: bool = False,
) -> RoleMemory:
    """`is_moved`: its own weights are in host memory between its turns."""
    weights = list(train_step.weights().values()) if train_step else []
    copies = train_step.copy_bytes() if train_step else 0
    learns = sum(weight.numel() for weight in weights)
    held = sum(local(weight).numel() for weight in weights)
    state = held * (train_step.moment_bytes if train_step else 0) + copies
    state_on_host = state if train_step and train_step.on_host else 0
    own_bytes = num_bytes(own)
    return RoleMemory(
        role=role,
        shared_bytes=num_bytes(shared),
        own_bytes=0 if is_moved else own_bytes,
        learning_bytes=held * _GRADIENT_BYTES + state - state_on_host,
        learns=learns,
        host_bytes=state_on_host + (own_bytes if is_moved else 0),
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of what this process has of all tensors, each counted once however often it occurs."""
    by_id = {id(tensor): tensor for tensor in tensors}
    return sum(local(tensor).nbytes for tensor in by_id.values())


def table(rows: Sequence[RoleMemory]) -> list[str]:
    """The lines of the memory table; what is in host memory has a column where there is something.

    >>> row = RoleMemory(role="actor", shared_bytes=2_000_000, own_bytes=1_500_000, learning_bytes=0, learns=0)
    >>> print("\\n".join(table([row])))
    role        shared MB    own MB  learning MB  weights that learn
    actor             2.0       1.5          0.0                   0
    total                       1.5          0.0                   0
    >>> row = RoleMemory(role="critic", shared_bytes=0, own_bytes=0, learning_bytes=0, learns=0, host_bytes=3_000_000)
    >>> print(table([row])[1])
    critic            0.0       0.0          0.0                   0       3.0
    """

    has_host = any(row.host_bytes for row in rows)

    def line(role: str, *columns: str, host: str) -> str:
        cells = (f"{text:>{width}}" for text, width in zip(columns, (10, 9, 12, 19), strict=True))
        return " ".join([f"{role:<10}", *cells, *([f"{host:>9}"] if has_host else [])])

    def row_of(row: RoleMemory) -> str:
        columns = (_mb(row.shared_bytes), _mb(row.own_bytes), _mb(row.learning_bytes), f"{row.learns:,}")
        return line(row.role, *columns, host=_mb(row.host_bytes))

    own, learning = sum(row.own_bytes for row in rows), sum(row.learning_bytes for row in rows)
    learns, on_host = sum(row.learns for row in rows), sum(row.host_bytes for row in rows)
    heading = line("role", "shared MB", "own MB", "learning MB", "weights that learn", host="host MB")
    total = line("total", "", _mb(own), _mb(learning), f"{learns:,}", host=_mb(on_host))
    return [heading, *map(row_of, rows), total]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    return [parameter for module in modules for parameter in module.parameters()]
