"""Losses of preferences by the names that other tools have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from kedge.core.quoting import quoted
from kedge.importing.rules import Outcome, Rule, Source, number, refused, unneeded

DPO_LOSSES: Final = (
    "sigmoid", "robust", "exo_pair", "aot", "aot_pair", "hinge", "nca_pair", "sppo_hard", "apo_zero",
    "apo_down", "discopop",
)  # fmt: skip
SMOOTHED: Final = ("sigmoid", "robust", "exo_pair", "aot", "aot_pair")
RENAMED: Final = {"aot_unpaired": "aot", "cdpo": "sigmoid"}


def method(settings: Mapping[str, Any], why: str = "", *, is_same: bool = True) -> Outcome:
    """A method with its settings."""
    sets = {f"stage.method.{key}": value for key, value in settings.items()}
    return Outcome(verdict="taken" if is_same else "changed", sets=sets, why=why)


def loss_type(value: Any, source: Source) -> Outcome:
    """A loss of DPO, or several with weights, of which the likelihood of the chosen answer is one that is there."""
    losses = [str(loss) for loss in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    given: Any = source.get("loss_weights")
    weights = (
        [number(weight) for weight in cast("list[Any]", given)] if isinstance(given, list) else [1.0] * len(losses)
    )
    if len(weights) != len(losses):
        raise ValueError(f"{len(losses)} losses have {len(weights)} weights (loss_weights)")
    by_loss = dict(zip(losses, weights, strict=True))
    likelihood = by_loss.pop("sft", 0.0)
    main = [RENAMED.get(loss, loss) for loss in by_loss]
    if len(main) != 1:
        raise ValueError(f"one loss, with `sft` beside it, can be had; found {quoted(losses)}")
    weight = next(iter(by_loss.values()))
    if not weight > 0:
        raise ValueError(f"the weight of {main[0]} must be above 0, found {weight:g}")
    extra = {"sft_weight": likelihood / weight} if likelihood else {}
    if weight != 1:
        return _divided(_one_loss(main[0], extra, source), weight)
    return _one_loss(main[0], extra, source)


def _divided(outcome: Outcome, weight: float) -> Outcome:
    why = f"all of it divided by the loss's own weight {weight:g}, which AdamW does not see"
    return Outcome(verdict="changed", sets=outcome.sets, why="; ".join(part for part in (outcome.why, why) if part))


def _one_loss(loss: str, extra: Mapping[str, float], source: Source) -> Outcome:
    if loss == "ipo":
        return method(
            {"kind": "ipo", "log_probs": "mean", **extra}, "means of log-probs, as TRL has them", is_same=False
        )
    if loss in DPO_LOSSES:
        return method({"kind": "dpo", "loss": loss, **extra}, is_same=not extra)
    if loss == "simpo":
        return method({"kind": "simpo", "sft_weight": source.number("cpo_alpha", 0.0)})
    raise ValueError(f"there is no loss {quoted(loss)} here; there are ipo, simpo, {', '.join(DPO_LOSSES)}")


def setting(key: str, kinds: tuple[str, ...]) -> Rule:
    """A number of a method, for the trainers that read it."""

    def rule(value: Any, source: Source) -> Outcome:
        if source.trainer not in kinds:
            return unneeded(f"{source.trainer} does not read it")
        return method({key: number(value)})

    return rule


def smoothing(value: Any, source: Source) -> Outcome:
    share = number(value)
    losses = source.get("loss_type", "sigmoid")
    first = next(iter(cast("list[Any]", losses)), "") if isinstance(losses, list) else losses
    if share == 0:
        return unneeded("it asks for nothing")
    if RENAMED.get(str(first), str(first)) not in SMOOTHED:
        return refused(f"the loss {first} does not read it")
    return method({"label_smoothing": share})
