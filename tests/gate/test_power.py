"""The gate on simulated exams, a few seeds of `benchmarks/gate_power.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "gate_power.py"


@pytest.fixture(scope="module")
def power() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gate_power", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_equal_models_pass_and_a_loss_of_three_points_fails(power: ModuleType) -> None:
    equal, worse = power.simulate_one(20, loss=0.0), power.simulate_one(20, loss=0.03)
    assert equal["pass"] >= 18
    assert equal["fail"] == 0
    assert worse["fail"] == 20


def test_the_default_rules_let_equal_models_pass(power: ModuleType) -> None:
    """One seed only; what is checked is that every rule that ships can be decided by exams of the real sizes."""
    simulated = power.simulate_whole(1)
    assert len(simulated.single) == 12
    assert not any(counts["fail"] for counts in simulated.single.values())
