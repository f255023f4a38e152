"""The attacks of `attacks.CASES` against the sandbox: all in every layer in the slow set, some of each group in the
strongest layer in the quick one."""

from __future__ import annotations

import attacks
import pytest


def _needs(layer: str | None) -> None:
    if problem := attacks.arena().problem:
        pytest.skip(f"attacks are not tried on this machine: {problem}")
    if layer not in (None, "none", *attacks.arena().layers):
        pytest.skip(f"{layer} does not work on this machine")


def _some_of_each_group() -> list[attacks.Attack]:
    groups: dict[str, list[attacks.Attack]] = {}
    for case in attacks.CASES:
        groups.setdefault(case.name.partition(":")[0], []).append(case)
    return [case for group in groups.values() for case in group[::3]]


@pytest.mark.parametrize("case", _some_of_each_group(), ids=str)
def test_the_sandbox_holds(case: attacks.Attack) -> None:
    _needs(None)
    assert attacks.attempt(case) is None


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["bubblewrap", "namespaces", "limits"])
@pytest.mark.parametrize("case", attacks.CASES, ids=str)
def test_every_layer_holds(case: attacks.Attack, layer: str) -> None:
    _needs(layer)
    assert attacks.attempt(case, layer) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in attacks.CASES if case.bites], ids=str)
def test_the_attacks_do_harm_without_a_sandbox(case: attacks.Attack) -> None:
    """Else they would prove nothing."""
    _needs("none")
    assert attacks.attempt(case, "none") is not None
    if case.name.startswith("priority"):
        attacks.arena().close()  # its priority is spoilt for good


def test_there_are_many_attacks_and_most_of_them_bite() -> None:
    assert len({case.name for case in attacks.CASES}) == len(attacks.CASES) >= 85
    assert sum(case.bites for case in attacks.CASES) >= 85
