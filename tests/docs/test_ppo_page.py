"""docs/ppo.md speaks of every setting of the stage, and of every metric that an iteration writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.core.optimiser import OptimiserSettings
from kedge.core.settings import Section
from kedge.monitor.detectors.settings import DetectorSettings
from kedge.stages.ppo.settings import PPOSettings
from kedge.trainers.settings import PPOConfig

PAGE = (Path(__file__).parents[2] / "docs/ppo.md").read_text(encoding="utf-8")
ELSEWHERE = {"optimiser", "lora", "checkpoints", "kind", "iterations", "trunk_layers"}
"""Settings that other pages are about, or whose name is their meaning."""


def settings_of(section: type[Section]) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield info.alias or name
        inner = info.annotation
        if (
            isinstance(inner, type)
            and issubclass(inner, Section)
            and inner not in (OptimiserSettings, DetectorSettings)
        ):
            yield from settings_of(inner)


@pytest.mark.parametrize("name", sorted({*settings_of(PPOSettings), *settings_of(PPOConfig)} - ELSEWHERE))
def test_every_setting_has_a_line(name: str) -> None:
    assert f"`{name}" in PAGE or f".{name}" in PAGE or f"`{name}`" in PAGE
