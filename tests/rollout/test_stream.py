"""Who samples with which weights, and with which seed; and what of it a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kedge.core.errors import KedgeError
from kedge.core.records import Prompts, Rollouts, repeated
from kedge.runs.state import load_state, save_state
from kedge.stages.rl.prompts import RolloutStream, batches_of, state_of


class _Recorder:
    """Answers with its version; remembers the seeds it was given. From batch `broken` on it fails."""

    def __init__(self, *, broken: int = 99) -> None:
        self.version, self.seeds, self._broken = 0, list[int](), broken

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
        self.seeds.append(seed)
        tokens_BT = torch.tensor(prompts.tokens)
        future = Future[Rollouts]()
        if prompts.group[0] >= 100 + self._broken:
            future.set_exception(KedgeError("the engine is gone"))
            return future
        future.set_result(
            Rollouts(
                tokens_BT=tokens_BT,
                attention_mask_BT=tokens_BT > 0,
                response_mask_BT=tokens_BT > 1,
                behaviour_logp_BT=torch.full(tokens_BT.shape, -0.1 * len(self.seeds)),
                group_B=torch.tensor(prompts.group),
                finished_B=torch.tensor([True]),
                version=self.version,
            )
        )
        return future

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.version = version


def _prompts(number: int) -> Prompts:
    return repeated([[1, 2]], ids=[100 + number], answers=1)


def _stream(generator: _Recorder, *, lag: int, end: int = 6) -> RolloutStream:
    return RolloutStream(generator, _prompts, lag=lag, seed=9, end=end)


def _learn(stream: RolloutStream, generator: _Recorder, *, start: int = 0, end: int) -> list[tuple[int, int]]:
    """(batch, age of its answers) of these batches, with new weights after each."""
    ages = list[tuple[int, int]]()
    for number in range(start, end):
        generator.load_weights({}, version=number)
        rollouts = stream.take(number)
        ages.append((int(rollouts.group_B[0]) - 100, number - rollouts.version))
    return ages


@pytest.mark.parametrize(
    ("lag", "ages"),
    [(0, [0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2, 2]), (9, [0, 1, 2, 3, 4, 5])],
)
def test_lag_is_how_many_versions_old_a_batch_is_at_most(lag: int, ages: list[int]) -> None:
    generator = _Recorder()
    stream = _stream(generator, lag=lag)
    assert _learn(stream, generator, end=6) == list(enumerate(ages))
    assert len(generator.seeds) == 6  # nothing is asked for beyond the end
    assert stream.under_way == ()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_batch_has_a_seed_of_its_number_alone(lag: int) -> None:
    on_policy, ahead = _Recorder(), _Recorder()
    _learn(_stream(on_policy, lag=0), on_policy, end=6)
    _learn(_stream(ahead, lag=lag), ahead, end=6)
    assert len(set(on_policy.seeds)) == 6
    assert ahead.seeds == on_policy.seeds


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_what_is_under_way_goes_through_a_checkpoint_and_comes_first(lag: int, tmp_path: Path) -> None:
    whole, before, after = _Recorder(), _Recorder(), _Recorder()
    undisturbed = _learn(_stream(whole, lag=lag), whole, end=6)
    stopped = _stream(before, lag=lag)
    first = _learn(stopped, before, end=3)
    assert [number for number, _ in stopped.under_way] == list(range(3, 3 + lag))
    save_state(tmp_path, {"under_way": state_of(stopped.under_way)})
    resumed = _stream(after, lag=lag)
    resumed.replace(batches_of(load_state(tmp_path)["under_way"], "cpu"))
    for (number, future), (other_number, other) in zip(stopped.under_way, resumed.under_way, strict=True):
        expected, found = future.result(), other.result()
        assert (number, expected.version) == (other_number, found.version)
        assert torch.equal(expected.behaviour_logp_BT, found.behaviour_logp_BT)
        assert torch.equal(expected.tokens_BT, found.tokens_BT)
    assert first + _learn(resumed, after, start=3, end=6) == undisturbed
    assert before.seeds + after.seeds == whole.seeds


def test_what_is_under_way_is_given_up_where_a_run_goes_back() -> None:
    pending = list[Future[Rollouts]]()

    class Slow(_Recorder):
        def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]:
            if prompts.group[0] == 100:
                return super().submit(prompts, seed)
            pending.append(Future())
            return pending[-1]

    stream = _stream(Slow(), lag=2)
    stream.take(0)
    stream.replace(())
    assert [future.cancelled() for future in pending] == [True, True]
    assert stream.under_way == ()


def test_batches_before_one_that_failed_are_kept_and_the_error_comes_to_light_in_its_turn() -> None:
    generator = _Recorder(broken=2)
    stream = _stream(generator, lag=2)
    stream.take(0)
    assert [batch["number"] for batch in state_of(stream.under_way)] == [1]
    stream.take(1)
    with pytest.raises(KedgeError, match="the engine is gone"):
        stream.take(2)
