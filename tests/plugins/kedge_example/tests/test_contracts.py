"""What Kedge expects of each part, checked by the contracts that it ships."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from kedge_example import brevity, capped, lines
from kedge_example.full_precision import full_precision
from kedge_example.median import MEDIAN
from kedge_example.short_prompts import STAGE

from kedge.core.answers import TextSource
from kedge.core.protocols import Generator, Tracker
from kedge.models.loading.tiny import tiny_model
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.rollout.generators import GeneratorParts
from kedge.rollout.settings import SamplingSettings
from kedge.testing.contracts import (
    BatchInvariantGeneratorContract,
    GroupMethodContract,
    StageContract,
    TextSourceContract,
    TrackerContract,
)
from kedge.testing.contracts.roles import RolesContract


class TestShortPrompts(StageContract):
    stage = STAGE
    values: ClassVar = {"kind": "short_prompts", "data": "prompts.jsonl"}


class TestMedian(GroupMethodContract):
    method = MEDIAN


class TestBrevity(TextSourceContract):
    def make(self) -> TextSource:
        return brevity.make({"longest": 40}, None)


class TestCapped(BatchInvariantGeneratorContract):
    vocabulary, stop_ids, max_new_tokens = 256, range(0, 256, 16), 14

    def make(self) -> Generator:
        self.model = tiny_model(seed=3, hidden=32)
        parts = GeneratorParts(
            model=self.model,
            sampling=SamplingSettings(max_new_tokens=30),
            stop_ids=self.stop_ids,
            pad=256,
            max_rows=8,
            decode=str,
        )
        return capped.make(capped.CappedSettings(tokens=self.max_new_tokens), parts)

    def new_weights(self) -> Mapping[str, torch.Tensor]:
        """It samples with the trainer's own module: changed there, nothing is left to be loaded."""
        with torch.no_grad():
            self.model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(-9.0)
        return {}


class TestLines(TrackerContract):
    def make(self, folder: Path) -> Tracker:
        return lines.make(folder, "run/stage", {})

    def logged(self, folder: Path) -> list[tuple[int, str, float]]:
        """Steps, names and values that it was given, read back from where it put them."""
        rows = [line.split() for line in (folder / "trackers/lines.txt").read_text().splitlines()]
        return [(int(row[0]), row[1], float(row[2])) for row in rows if len(row) == 3]


class TestFullPrecision(RolesContract):
    def build(self, spec: RoleSpec) -> RoleSet:
        return full_precision(spec)
