"""Contract tests for plugins: subclass a contract, give it a factory, and pytest checks the promises of that kind.

    from kedge.testing.contracts import TextSourceContract

    class TestBrevity(TextSourceContract):
        def make(self):
            return Brevity(longest=200)

| contract | for |
|---|---|
| `TextSourceContract` | sources that score text: entry point `kedge.rewards` |
| `RewardSourceContract` | sources that score rollouts |
| `GeneratorContract` | engines that sample: entry point `kedge.generators` |
| `BatchInvariantGeneratorContract` | those whose answers do not depend on the rest of the batch |
| `TrackerContract` | trackers: entry point `kedge.trackers` |
| `StageContract` | stages: entry point `kedge.stages` |
| `GroupMethodContract` | critic-free methods: entry point `kedge.algorithms` |
| `roles.RolesContract` | ways of holding the roles: entry point `kedge.roles`; not imported here: needs transformers |
"""

from __future__ import annotations

from kedge.testing.contracts.generators import BatchInvariantGeneratorContract, GeneratorContract
from kedge.testing.contracts.group_methods import GroupMethodContract
from kedge.testing.contracts.rewards import RewardSourceContract, TextSourceContract
from kedge.testing.contracts.stages import StageContract
from kedge.testing.contracts.trackers import TrackerContract

__all__ = [
    "BatchInvariantGeneratorContract",
    "GeneratorContract",
    "GroupMethodContract",
    "RewardSourceContract",
    "StageContract",
    "TextSourceContract",
    "TrackerContract",
]
