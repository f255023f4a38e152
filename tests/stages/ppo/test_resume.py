"""A PPO run that ends somewhere and is taken up again is the run that never ended, to the last bit.

Here it ends by an exception or by Ctrl-C; kill -9 at any moment is `tests/parity`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import CheckpointError
from kedge.models.roles import separate
from kedge.models.training.train_step import TrainStep
from kedge.rollout.local import LocalGenerator
from kedge.runs.folder import Run, status_of
from kedge.runs.state import load_state
from kedge.stages.shared import loop

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
Whole = Callable[[str], Path]


def everything(roles: str, home: Path) -> dict[str, Any]:
    """All that has a state: a reward model beside a function, adaptive KL, moments of scores, an average, imitation."""
    judge = home / ("judge-lora" if roles == "lora" else "judge")
    parts = {"model": {"kind": "model", "from": str(judge)}, "rule": {"kind": "function", "path": "rules.py:plain"}}
    return {
        "roles": roles,
        "reward": {"kind": "mix", "parts": parts, "weights": {"rule": 2.0}},
        "gold": {"kind": "function", "path": "rules.py:plain"},
        "iterations": 5,
        "answers": 2,
        "batch": 3,
        "micro_batch": 2,
        "epochs": 2,
        "kl": {"start": 0.1, "target": 0.5, "horizon": 20},
        "scores": {"normalise": "standard"},
        "ema": 0.9,
        "loss": {"imitate": {"data": str(home / "demonstrations.jsonl"), "batch": 2, "max_length": 64}},
        "actor": {"schedule": "cosine", "warmup": 0.3},
        "checkpoints": {"every": 2},
    }


@pytest.fixture(scope="module")
def whole(run_ppo: RunPPO, ppo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The stage folder of a run that nothing interrupted, made once for each way to hold the roles."""
    made: dict[str, Path] = {}

    def run(roles: str) -> Path:
        if roles not in made:
            made[roles] = run_ppo(tmp_path_factory.mktemp(roles), **everything(roles, ppo_home))
        return made[roles]

    return run


def assert_same(found: Path, expected: Path, records: Records) -> None:
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(found / journal) == records(expected / journal)
    assert len(records(expected / "metrics.jsonl")) == 5
    model = "model/model.safetensors"
    assert (found / model).read_bytes() == (expected / model).read_bytes()
    assert status_of(found) == "done"


class Fallen(Exception):
    pass


def falls(real: Callable[..., Any], *, call: int, action: Callable[[], None]) -> Callable[..., Any]:
    """The same function, but something happens in one of its calls before it does anything."""
    calls = iter(range(1, 999))

    def function(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == call:
            action()
        return real(*arguments, **settings)

    return function


def fall() -> None:
    raise Fallen


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


PLACES = {
    "generation": (LocalGenerator, "generate", 4),
    "update": (TrainStep, "learn", 21),  # 4 steps of each of two roles an iteration: in the third
    "saving": (loop, "save_state", 3),  # the first is of step 0
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        ("separate", "update"),
        ("lora", "generation"),
        pytest.param("trunk", "saving", marks=SLOW),
        pytest.param("separate", "generation", marks=SLOW),
        pytest.param("separate", "saving", marks=SLOW),
        pytest.param("lora", "update", marks=SLOW),
        pytest.param("lora", "saving", marks=SLOW),
        pytest.param("trunk", "generation", marks=SLOW),
        pytest.param("trunk", "update", marks=SLOW),
    ],
)
def test_a_run_that_fell_is_taken_up_to_the_last_bit(
    roles: str, place: str, whole: Whole, run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    expected = whole(roles)
    owner, name, call = PLACES[place]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, falls(getattr(owner, name), call=call, action=fall))
        with pytest.raises(Fallen):
            run_ppo(tmp_path, **everything(roles, ppo_home))
    stage = tmp_path / "runs/short/ppo"
    assert status_of(stage) == "failed"
    assert Run.open(stage, for_writing=False).checkpoints.steps()[-1] == 2
    run_ppo(tmp_path, resumed=True, **everything(roles, ppo_home))
    assert_same(stage, expected, records)


def test_every_part_of_the_state_moves(whole: Whole, records: Records) -> None:
    """So that the comparison above says something about each of them."""
    found = records(whole("separate") / "metrics.jsonl")
    for name in ("kl/coef", "policy/ptx_loss", "reward/mean", "gold/mean", "kl/mean", "policy/lr", "value/loss"):
        assert len({one[name] for one in found}) == 5, name
    state = load_state(whole("separate") / "checkpoints/step-000004")
    assert state["shaper"]["moments"]["count"] == 4 * 6
    assert state["roles"]["policy"]["ema"].keys() == state["roles"]["policy"]["train_step"]["weights"].keys()
    assert [counter["rows"] for source in state["failures"] for counter in source] == [24, 24, 24]


def test_ctrl_c_saves_and_the_run_goes_on_to_the_last_bit(
    whole: Whole,
    run_ppo: RunPPO,
    records: Records,
    ppo_home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = whole("separate")
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalGenerator, "generate", falls(LocalGenerator.generate, call=3, action=interrupt))
        with pytest.raises(KeyboardInterrupt):
            run_ppo(tmp_path, **everything("separate", ppo_home))
    stage = tmp_path / "runs/short/ppo"
    assert "stopping after this step, with everything saved; once more to stop at once" in capsys.readouterr().out
    assert (status_of(stage), status_of(stage.parent)) == ("interrupted", "interrupted")
    assert len(records(stage / "metrics.jsonl")) == 3  # the iteration under way was finished
    assert Run.open(stage, for_writing=False).checkpoints.steps()[-1] == 3
    (event,) = records(stage / "events.jsonl")
    assert (event["code"], event["step"]) == ("run.interrupted", 3)
    assert signal.getsignal(signal.SIGINT) is before
    run_ppo(tmp_path, resumed=True, **everything("separate", ppo_home))
    assert_same(stage, expected, records)


def test_ctrl_c_twice_stops_at_once(
    whole: Whole, run_ppo: RunPPO, records: Records, ppo_home: Path, tmp_path: Path
) -> None:
    def twice() -> None:
        interrupt()
        interrupt()
        pytest.fail("it went on")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalGenerator, "generate", falls(LocalGenerator.generate, call=4, action=twice))
        with pytest.raises(KeyboardInterrupt):
            run_ppo(tmp_path, **everything("separate", ppo_home))
    stage = tmp_path / "runs/short/ppo"
    assert status_of(stage) == "interrupted"
    assert len(records(stage / "metrics.jsonl")) == 3
    assert Run.open(stage, for_writing=False).checkpoints.steps()[-1] == 2
    run_ppo(tmp_path, resumed=True, **everything("separate", ppo_home))
    assert_same(stage, whole("separate"), records)


def test_ctrl_c_in_the_last_iteration_ends_the_run_as_ever(
    run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LocalGenerator, "generate", falls(LocalGenerator.generate, call=2, action=interrupt))
    stage = run_ppo(tmp_path, iterations=2)
    assert status_of(stage) == "done"
    assert (stage / "model/model.safetensors").is_file()


def test_another_reference_than_the_run_began_with_is_refused(
    run_ppo: RunPPO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalGenerator, "generate", falls(LocalGenerator.generate, call=2, action=fall))
        with pytest.raises(Fallen):
            run_ppo(tmp_path)
    monkeypatch.setattr(separate, "module_hash", lambda _: "of-other-weights")
    with pytest.raises(CheckpointError, match="the weights it would go on with have of-other-weights; put the model"):
        run_ppo(tmp_path, resumed=True)
