"""Who samples with which weights, and with which seed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from kedge.core.records import Prompts, Rollouts, repeated
from kedge.stages.rl.prompts import stream


class _Recorder:
    """Answers with its version; remembers the seeds it was given."""

    def __init__(self) -> None:
        self.version, self.seeds = 0, list[int]()

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        self.seeds.append(seed)
        tokens_BT = torch.tensor(prompts.tokens)
        future = Future[Rollouts]()
        future.set_result(
            Rollouts(
                tokens_BT=tokens_BT,
                attention_mask_BT=tokens_BT > 0,
                response_mask_BT=tokens_BT < 0,
                behaviour_logp_BT=torch.zeros(tokens_BT.shape),
                group_B=torch.tensor(prompts.group),
                finished_B=torch.tensor([True]),
                version=self.version,
            )
        )
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.version = version


def _train(lag: int) -> list[tuple[int, int]]:
    """(batch, version that sampled it) of four batches, with new weights after each."""
    generator, versions = _Recorder(), list[tuple[int, int]]()
    for step, rollouts in enumerate(stream(generator, _batches(4), lag=lag, seed=9)):
        versions.append((int(rollouts.group_B[0]), rollouts.version))
        generator.load_weights({}, version=step + 1)
    return versions


def _batches(count: int) -> list[Prompts]:
    return [repeated([[1, 2]], ids=[100 + number], answers=1) for number in range(count)]


@pytest.mark.parametrize(
    ("lag", "versions"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1]), (9, [0, 0, 0, 0])]
)
def test_lag_is_how_many_versions_old_a_batch_is(lag: int, versions: list[int]) -> None:
    assert _train(lag) == list(zip([100, 101, 102, 103], versions, strict=True))


def test_every_batch_has_its_own_seed_and_a_resumed_run_goes_on_with_them() -> None:
    whole, rest = _Recorder(), _Recorder()
    list(stream(whole, _batches(4), lag=0, seed=9))
    list(stream(rest, _batches(4)[2:], lag=0, seed=9, start=2))
    assert len(set(whole.seeds)) == 4
    assert rest.seeds == whole.seeds[2:]
