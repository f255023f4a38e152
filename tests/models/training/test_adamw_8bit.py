"""AdamW in 8 bits: refused with words where no package has it, and continued to the last bit from a state on disk."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from kedge.core import optimiser as settings_module
from kedge.core.optimiser import EIGHT_BIT_PACKAGES, OptimiserSettings
from kedge.models.training import adamw
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep
from kedge.runs.state import load_state, save_state


class EightBits(torch.optim.Optimizer):
    """Sign descent that counts in bytes: a state as those packages have one, in codes and numbers."""

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"step": 0, "quant": {"codes1": torch.zeros_like(weight, dtype=torch.uint8)}}
                state["step"] += 1
                state["quant"]["codes1"] += (weight.grad > 0).to(torch.uint8) + 1
                weight -= group["lr"] * weight.grad.sign() * state["quant"]["codes1"]

    def load_state_dict(self, state_dict: Any) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, state in state_dict["state"].items():
            self.state[weights[index]] = {"step": state["step"], "quant": dict(state["quant"])}


def train_step(module: nn.Module) -> TrainStep:
    settings = OptimiserSettings(name="adamw_8bit", lr=1e-2)
    return TrainStep(list(module.named_parameters()), settings, total_steps=6)


def learn(step: TrainStep, module: nn.Module) -> None:
    def sums(x_B: Tensor) -> Sums:
        return Sums(loss=(module(x_B[:, None].expand(-1, 128)) - 1).square().sum(), facts={})

    objective: Objective[Tensor] = Objective(weight=len, sums=sums)
    step.learn(Term(objective=objective, batches=lambda _: [torch.linspace(-1, 1, 5) * step.step]))


def exact_resume(folder: Path) -> None:
    torch.manual_seed(1)
    straight, resumed = nn.Linear(128, 64), nn.Linear(128, 64)
    first = train_step(straight)
    learn(first, straight)
    learn(first, straight)
    save_state(folder, first.state())
    second = train_step(resumed)
    second.load(load_state(folder))
    for _ in range(3):
        learn(first, straight)
        learn(second, resumed)
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_package_it_is_refused_with_the_command_that_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(ValidationError, match="needs bitsandbytes or torchao, and neither is installed: pip install"):
        OptimiserSettings(name="adamw_8bit")
    assert OptimiserSettings().name == "adamw"


def test_a_state_in_codes_goes_on_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(adamw, "import_module", lambda name: SimpleNamespace(AdamW8bit=EightBits))
    exact_resume(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("package", EIGHT_BIT_PACKAGES)
def test_a_real_package_goes_on_to_the_last_bit(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(adamw, "eight_bit_package", lambda: package)
    exact_resume(tmp_path)
