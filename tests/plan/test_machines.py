"""What a run can be planned for, and what is refused with words."""

from __future__ import annotations

import pytest

from kedge.core.errors import ConfigError
from kedge.plan import machines
from kedge.plan.machines import GIB, find_machine, this_machine


def test_cards_by_name_by_size_and_the_cpu() -> None:
    assert find_machine("H200").memory == int(139.8 * GIB)
    assert find_machine("NVIDIA-4090").name == "4090"
    assert (find_machine("48").memory, find_machine("24GB").memory) == (48 * GIB, 24 * GIB)
    assert find_machine("cpu").kind == "cpu"
    assert find_machine("h100", gpus=8, price=2.5).gpus == 8


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu": "a100-80gg"}, "did you mean 'a100-80g'"),
        ({"gpu": "0"}, "no card named '0'"),
        ({"gpu": "h200", "gpus": 0}, "--gpus: found 0, expected 1 or more"),
        ({"gpu": "h200", "price": -1.0}, "--price: found -1"),
        ({"gpu": "h200", "label_price": float("nan")}, "--label-price"),
        ({"gpu": "cpu", "gpus": 2}, "has no GPU"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match="--") as refused:
        find_machine(**asked)  # pyright: ignore[reportArgumentType]
    assert words in str(refused.value)


def test_this_machine_is_what_the_driver_says_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(machines.subprocess, "run", absent)
    assert this_machine().kind == "cpu"
    assert this_machine().memory > GIB
