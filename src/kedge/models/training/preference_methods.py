"""Settings of the preference methods, one section each. Free of torch, so that a recipe is checked without it.

Defaults are those of the papers; docs/preference.md says which and where.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from kedge.core.settings import Section
from kedge.core.suggest import did_you_mean

DPOLoss = Literal[
    "sigmoid", "robust", "exo_pair", "aot", "aot_pair", "ipo", "hinge", "nca_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop",
]  # fmt: skip
SMOOTHED: Final = ("sigmoid", "robust", "exo_pair", "aot", "aot_pair")
"""The losses of DPO that read `label_smoothing`."""
SORTED: Final = ("aot", "aot_pair")
"""The losses of DPO that sort over a whole step, so that it cannot be cut into micro-batches."""


class DPO(Section):
    """Direct preference optimisation (Rafailov et al. 2023) and its relatives that differ in the loss of a margin."""

    kind: Literal["dpo"] = "dpo"
    loss: DPOLoss = "sigmoid"
    """From the margin of a pair to its loss."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly the reference holds: the KL coefficient of the RLHF problem that DPO solves."""
    label_smoothing: float = Field(default=0.0, ge=0, le=0.5)
    """Share of labels that are taken to be wrong."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of an additional likelihood loss on the chosen answer; it counters likelihood displacement."""

    @model_validator(mode="after")
    def _smoothing_is_read(self) -> DPO:
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but loss '{self.loss}' does not read it; "
                f"leave it at 0, or take one of {', '.join(SMOOTHED)}"
            )
        if self.loss == "robust" and self.label_smoothing == 0.5:
            raise ValueError("label_smoothing must be below 0.5 for loss 'robust': at 0.5 labels say nothing")
        return self


class IPO(Section):
    """Identity preference optimisation (Azar et al. 2023): the margin is pulled to 1 / (2 beta), not to infinity."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(default=0.1, gt=0)
    """The paper's τ."""
    log_probs: Literal["sum", "mean"] = "sum"
    """Of an answer: the sum over its tokens, as in the paper, or the mean, as some trainers do."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of an additional likelihood loss on the chosen answer."""


class ORPO(Section):
    """Odds-ratio preference optimisation (Hong et al. 2024): imitation and a penalty on the odds; no reference."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0)
    """The paper's λ: weight of the odds ratio."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of imitating the chosen answer."""


class SimPO(Section):
    """Simple preference optimisation (Meng et al. 2024): length-averaged log-probs and a margin; no reference."""

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0)
    """Scale of the length-averaged log-probs."""
    gamma: float = Field(default=1.0, ge=0)
    """The target margin; the paper advises about half of beta."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of an additional likelihood loss on the chosen answer."""


class CPO(Section):
    """Contrastive preference optimisation (Xu et al. 2024): DPO with a uniform reference, and imitation."""

    kind: Literal["cpo"] = "cpo"
    beta: float = Field(default=0.1, gt=0)
    """Scale of the difference of log-probs."""
    sft_weight: float = Field(default=1.0, ge=0)
    """Weight of imitating the chosen answer."""


class KTO(Section):
    """Kahneman–Tversky optimisation (Ethayarajh et al. 2024): single answers that people liked or did not."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """How strongly the reference holds."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of liked answers."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of disliked ones; weight times count should be about the same on both sides."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of an additional likelihood loss on the liked answers."""


class TDPO(Section):
    """Token-level DPO (Zeng et al. 2024): the margin is shifted by the KL of each answer's token positions."""

    kind: Literal["tdpo"] = "tdpo"
    beta: float = Field(default=0.1, gt=0)
    """How strongly the reference holds."""
    alpha: float | None = Field(default=0.5, ge=0)
    """Weight of the KL difference (TDPO2); null is TDPO1, without a weight and with its gradient on both sides."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of an additional likelihood loss on the chosen answer."""


AnyMethod = DPO | IPO | ORPO | SimPO | CPO | KTO | TDPO
NAMES: Final = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "tdpo")


def method_name(value: Any) -> Any:
    """The name that a recipe gives its method, known or not; None where it gives none."""
    return cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", value)


def _from_name(value: Any) -> Any:
    """`method: dpo` is `method: {kind: dpo}`."""
    name = method_name(value)
    if name is None:
        raise ValueError("a method with settings says which one it is, such as {kind: dpo, beta: 0.2}; found no kind")
    if name not in NAMES:
        raise ValueError(f"there is no method '{name}'{did_you_mean(str(name), NAMES)}; methods: {', '.join(NAMES)}")
    return {"kind": value} if isinstance(value, str) else value


Method = Annotated[AnyMethod, Field(discriminator="kind"), BeforeValidator(_from_name)]
"""A method by its name, or with settings: `dpo`, `{kind: dpo, beta: 0.2}`."""


def needs_reference(method: AnyMethod) -> bool:
    return not isinstance(method, ORPO | SimPO | CPO)


def is_averaged(method: AnyMethod) -> bool:
    """Whether an answer counts by the mean of its tokens' log-probs; by their sum otherwise."""
    return isinstance(method, ORPO | SimPO) or (isinstance(method, IPO) and method.log_probs == "mean")
