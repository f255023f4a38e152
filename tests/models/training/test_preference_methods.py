"""Methods by name or with settings, and what they refuse."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from kedge.algorithms.preference import DPO_KINDS, dpo
from kedge.core.errors import ConfigError
from kedge.models.training.preference_methods import (
    DPO,
    IPO,
    NAMES,
    AnyMethod,
    DPOLoss,
    Method,
    SimPO,
    is_averaged,
    needs_reference,
)

METHOD: TypeAdapter[AnyMethod] = TypeAdapter(Method)


def read(value: Any) -> AnyMethod:
    return METHOD.validate_python(value)


def test_a_name_alone_is_a_method_with_its_defaults() -> None:
    assert read("simpo") == SimPO(beta=2.0, gamma=1.0)
    assert read({"kind": "dpo", "loss": "ipo", "beta": 0.2}) == DPO(loss="ipo", beta=0.2)
    assert [read(name).kind for name in NAMES] == list(NAMES)


def test_a_wrong_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match=r"no method 'sipmo'.*did you mean 'simpo'.*methods: dpo, ipo"):
        read("sipmo")
    with pytest.raises(ValidationError, match=r"no method 'dp'.*did you mean 'dpo'"):
        read({"kind": "dp"})
    with pytest.raises(ValidationError, match=r"found no kind"):
        read({"beta": 0.2})
    with pytest.raises(ValidationError, match="gamma"):
        read({"kind": "dpo", "gamma": 1.0})


def test_every_loss_of_the_mathematics_can_be_asked_for() -> None:
    assert set(get_args(DPOLoss)) == set(DPO_KINDS)


@pytest.mark.parametrize("loss", DPO_KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 0.5])
def test_settings_refuse_what_the_mathematics_refuses(loss: str, smoothing: float) -> None:
    ones = torch.ones(1)
    try:
        dpo(ones, ones, ones, ones, beta=0.1, kind=loss, label_smoothing=smoothing)
        is_refused = False
    except ConfigError:
        is_refused = True
    method: Any = {"kind": "dpo", "loss": loss, "label_smoothing": smoothing}
    if is_refused:
        with pytest.raises(ValidationError, match="label_smoothing"):
            read(method)
    else:
        assert read(method).model_dump()["loss"] == loss


def test_who_asks_the_reference_and_who_averages() -> None:
    assert {name for name in NAMES if needs_reference(read(name))} == {"dpo", "ipo", "kto", "tdpo"}
    assert {name for name in NAMES if is_averaged(read(name))} == {"orpo", "simpo"}
    assert is_averaged(IPO(log_probs="mean"))
