"""Settings of adapters, memory, quantised bases and reward models. Free of torch, so that a recipe is checked without
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, cast, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from kedge.core.findings import Finding
from kedge.core.optimiser import OptimiserSettings
from kedge.core.quoting import quoted
from kedge.core.settings import Section
from kedge.core.stage import MayChange
from kedge.core.suggest import did_you_mean

BaseBits = Literal[16, 8, 4]
"""Bits a weight of a frozen base. 8 and 4 need CUDA and bitsandbytes."""

OffloadName = Literal["optimiser", "reference", "reward"]
"""What can be in host memory between its turns."""
_MOVABLE: Final[tuple[OffloadName, ...]] = get_args(OffloadName)

SaveDType = Literal["float32", "bfloat16"]
"""The type of the weights of a saved model."""


def _auto_or(allowed: str) -> WrapValidator:
    """One complaint for a choice of `auto` and something else, instead of one for each."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            nearest = did_you_mean(value, ("auto",)) if isinstance(value, str) else ""
            raise ValueError(f"must be {allowed}, found {quoted(value)}{nearest}") from error

    return WrapValidator(check)


AutoSize = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1)], _auto_or("auto or a whole number from 1 to 1,000,000")
]
"""How much is computed at once: chosen by what the device can do, or a number of rows."""

AutoFlag = Annotated[Literal["auto"] | bool, _auto_or("auto, true or false")]

Truncate = Literal["left", "refuse"]
"""What happens to a text longer than the window: its beginning is cut off, or it is an error. The end is never cut."""


def offload_names(*known: OffloadName) -> BeforeValidator:
    """Each of some words once, in one order; what is wrong with another word."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list of {', '.join(known)}, found {quoted(value)}")
        names = cast("list[Any] | tuple[Any, ...]", value)
        for name in names:
            if name in _MOVABLE and name not in known:
                raise ValueError(f"only the stages ppo and group move their {name}; here it is {', '.join(known)}")
            if name not in known:
                nearest = did_you_mean(name, known) if isinstance(name, str) else ""
                raise ValueError(f"must be of {', '.join(known)}, found {quoted(name)}{nearest}")
        return tuple(name for name in known if name in names)

    return BeforeValidator(check)


class TrainingMemory(Section):
    """Types of the weights, and what memory is traded for speed."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights: bfloat16 on a GPU, float32 on a CPU. Those that learn have float32 copies in any case."""
    recompute: bool = False
    """Recompute activations in the backward pass: about a third slower, in much less memory."""
    compile: AutoFlag = "auto"
    """On a GPU the layers of models that Kedge has kernels for run as CUDA graphs, those of others are compiled
    (torch.compile), which takes half a minute at the start; `true` compiles on a CPU too, `false` does neither."""
    save_dtype: SaveDType = "float32"
    """Of the saved weights: bfloat16 halves the files, and rounds away updates that are small beside the weights."""
    offload: Annotated[tuple[OffloadName, ...], offload_names("optimiser"), MayChange()] = ()
    """What is in the host's memory between its turns: `[optimiser]` are AdamW's moments and the float32 copies of
    weights in bfloat16. It changes speed and memory of a GPU, never a number; on a CPU it does nothing."""

    def compiles_on(self, device: str) -> bool:
        return device.startswith("cuda") if self.compile == "auto" else self.compile

    def offloads_on(self, device: str) -> frozenset[OffloadName]:
        """What is moved: beside a GPU alone there is another memory."""
        return frozenset(self.offload if device.startswith("cuda") else ())


def check_offload(kind: str, memory: TrainingMemory, optimisers: Mapping[str, OptimiserSettings]) -> Iterator[Finding]:
    """What keeps optimiser state from being moved; `optimisers` by their field."""
    for field, optimiser in optimisers.items():
        if "optimiser" in memory.offload and optimiser.name == "adamw_8bit":
            yield Finding(
                level="fatal",
                code=f"{kind}.offload",
                message=f"memory.offload has optimiser, and {field}.name is adamw_8bit, whose state its package keeps "
                "on the device",
                where="memory.offload",
                fix=f"set {field}.name to adamw, or leave optimiser out of memory.offload",
            )


def shared_reference(roles: str) -> str:
    """Why a reference that shares the weights of others is not moved."""
    return (
        f"memory.offload has reference, and under roles: {roles} it has no weights of its own to move: leave it out, "
        "or use roles: separate"
    )


class LoraSettings(Section):
    """Low-rank adapters (Hu et al. 2021): W + (alpha / rank) B A, where A and B are trained and W is frozen."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the change to each matrix; memory and trained weights grow with it."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the change, which is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(rank) instead, which keeps its size the same at every rank (Kalajdzievski 2023)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training."""
    targets: Literal["all"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all"
    """Which matrices get an adapter: all linear layers of the transformer blocks, or these names (`q_proj`)."""
    base_bits: BaseBits = 16
    """Bits a weight of the frozen base while adapters learn; 8 and 4 need CUDA and bitsandbytes. What is saved has
    the adapter merged into the base as it is on disk."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and (other := sorted({"dora", "use_dora"} & given.keys())):
            raise ValueError(f"{other[0]}: DoRA is not computed here, only plain LoRA; leave it out (rslora is there)")
        return given


class MeanOfMembers(Section):
    """The mean of the members."""

    kind: Literal["mean"] = "mean"


class WorstMember(Section):
    """The lowest member: an answer counts for as much as its harshest judge gives it."""

    kind: Literal["worst_case"] = "worst_case"


class UncertaintyWeighted(Section):
    """The mean minus a multiple of the variance over the members."""

    kind: Literal["uncertainty_weighted"] = "uncertainty_weighted"
    coef: float = Field(default=0.5, ge=0)
    """How much of the variance is subtracted."""


Combine = Annotated[MeanOfMembers | WorstMember | UncertaintyWeighted, Field(discriminator="kind")]
"""How the members of an ensemble become one score (Coste et al. 2023)."""
