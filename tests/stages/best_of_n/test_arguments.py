"""What both methods hand to their parts: every setting arrives where it belongs, and each round has its own seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kedge.core.seeds import seed_for
from kedge.data.batching import step_rows
from kedge.models.loading.tiny import make_tiny
from kedge.models.training.train_step import learning_rate
from kedge.rollout.local import LocalGenerator
from kedge.stages.best_of_n.settings import BestOfNSettings
from kedge.stages.best_of_n.train import train

RunStage = Callable[..., Any]
GIVEN: dict[str, Any] = {
    "kind": "best_of_n",
    "reward": {"kind": "function", "path": "rules.py:score"},
    "prompts": "prompts",
    "n": 2,
    "batch": 4,
    "micro_batch": 3,
    "max_prompt_tokens": 50,
    "sampling": {"max_new_tokens": 4, "temperature": 0.5},
    "optimiser": {"lr": 3e-3, "schedule": "linear", "warmup": 0.5},
    "checkpoints": {"every": 3},
    "samples": 2,
}
REJECTION = {"kind": "rejection", "rounds": 2, "epochs": 2, "finished": False}
BOND = {"kind": "bond", "steps": 4, "anchors": 3, "answers": 2}
RULES = "def score(answer):\n    return float(sum(map(ord, answer.text)))\n"
LORA = {"rank": 3, "dropout": 0.2}


def settings(method: dict[str, Any], **changes: Any) -> BestOfNSettings:
    return BestOfNSettings.model_validate({**GIVEN, "method": method, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("best")
    make_tiny(home / "tiny", hidden=32, layers=1)
    (home / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"P{number:02d}?"}) + "\n" for number in range(9))
    )
    return home


@pytest.fixture(scope="module")
def start(home: Path, run_recorded: RunStage) -> RunStage:
    def run(folder: Path, asked: BestOfNSettings, **options: Any) -> Any:
        (folder.parent / "rules.py").write_text(RULES)
        paths = {"from": str(home / "tiny"), "prompts": str(home / "prompts.jsonl")}
        return run_recorded(folder, train, asked, **paths, **options)

    return run


@pytest.fixture(scope="module")
def rejection(start: RunStage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(tmp_path_factory.mktemp("rejection") / "stage", settings(REJECTION, lora=LORA))


@pytest.fixture(scope="module")
def seeds() -> list[int]:
    """Those of the generator, in the run of `bond`."""
    return []


@pytest.fixture(scope="module")
def bond(start: RunStage, seeds: list[int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    generate = LocalGenerator.generate

    def noting(generator: LocalGenerator, prompts: Any, seed: int) -> Any:
        seeds.append(seed)
        return generate(generator, prompts, seed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalGenerator, "generate", noting)
        return start(tmp_path_factory.mktemp("bond") / "stage", settings(BOND))


def steps_of_rounds(recorded: Any) -> list[list[list[Any]]]:
    learners = list(dict.fromkeys(map(id, recorded.learners)))
    steps = list(zip(map(id, recorded.learners), recorded.updates, strict=True))
    return [[batches for learner, batches in steps if learner == own] for own in learners]


def numbers(recorded: Any, batches: list[Any]) -> list[int]:
    return sorted(int(text[text.index(b"P") + 1 :][:2]) for text in recorded.texts(batches))


# Rejection


def test_each_round_goes_on_where_the_one_before_ended(rejection: Any) -> None:
    assert [len(steps) for steps in steps_of_rounds(rejection)] == [5, 5]  # 2 passes over 9 answers, 4 a step
    assert list(rejection.metric("train/loss")) == list(range(1, 11))
    assert list(rejection.metric("best_of/round").items()) == [(0, 0), (5, 1), (10, -1)]
    assert rejection.checkpoints() == [3, 5, 8, 10]


def test_each_round_has_an_order_of_its_own(rejection: Any) -> None:
    for number, steps in enumerate(steps_of_rounds(rejection)):
        order = step_rows(9, epochs=2, batch=4, seed=seed_for(3, "order", number))
        assert [numbers(rejection, batches) for batches in steps] == [sorted(rows) for rows in order]
        assert [len(batch.tokens_BT) for batch in steps[0]] == [3, 1]
    assert list(dict.fromkeys(rejection.seeds)) == [seed_for(3, "dropout", number) for number in (0, 1)]


def test_adapters_learn_at_the_scheduled_rate_in_each_round(rejection: Any) -> None:
    weights = rejection.learners[0].state()["weights"]
    assert weights
    assert all(".lora_" in name and 3 in weight.shape for name, weight in weights.items())
    rates = [learning_rate(settings(REJECTION).optimiser, step, 5) for step in range(1, 6)]
    assert list(rejection.metric("train/lr").values()) == rates * 2


def test_answers_of_the_chosen_are_learnt_and_nothing_of_the_prompt(rejection: Any) -> None:
    for batch in (batch for batches in rejection.updates for batch in batches):
        assert batch.counted_BT.sum(dim=1).max() <= 4
        assert batch.counted_BT.sum(dim=1).min() >= 1


def test_the_kl_is_taken_at_the_temperature_of_sampling(start: RunStage, tmp_path: Path) -> None:
    """A policy that hardly learns stays where it was; at another temperature it would seem far away."""
    method = {**REJECTION, "epochs": 1}
    still = start(tmp_path / "stage", settings(method, optimiser={"lr": 1e-12}))
    assert [abs(kl) < 1e-4 for kl in still.metric("kl/mean").values()] == [True, True, True]


# BOND


def test_bond_takes_its_steps_and_saves_as_often_as_asked(bond: Any) -> None:
    assert list(bond.metric("train/loss")) == [1, 2, 3, 4]
    assert bond.checkpoints() == [3, 4]
    rates = [learning_rate(settings(BOND).optimiser, step, 4) for step in range(1, 5)]
    assert list(bond.metric("train/lr").values()) == rates


def test_each_step_has_prompts_best_answers_and_own_answers(bond: Any) -> None:
    for batches in bond.updates:
        assert max(len(batch.tokens_BT) for batch in batches) == 3
        assert sum(batch.item_B.sum().item() for batch in batches) == 4  # one chosen answer to each prompt of the step
        assert {weight for batch in batches for weight in batch.weight_B[batch.item_B].tolist()} == {0.5}
    own_rows = [sum((~batch.item_B).sum().item() for batch in batches) for batches in bond.updates]
    assert 4 < max(own_rows) <= 8  # two own answers to each prompt, less those without an advantage
    first = [json.loads(line) for line in (bond.folder / "answers-1.jsonl").read_text().splitlines()]
    assert len(first) == 9 * 3


def test_each_step_samples_with_a_seed_of_its_own(bond: Any, seeds: list[int]) -> None:
    steps = [seed_for(3, "own", number) for number in range(4)]
    assert bond.updates
    assert seeds == [seed_for(3, "answers", 0), *steps, seed_for(3, "answers", -1)]


def test_the_likelihood_is_taken_at_the_temperature_of_sampling(bond: Any, home: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / "tiny")
    total, items = 0.0, 0
    for batch in bond.updates[0]:
        with torch.no_grad():
            logits_BTV = model(input_ids=batch.tokens_BT, attention_mask=batch.attention_mask_BT).logits / 0.5
        logp_BT = logits_BTV.log_softmax(-1)[:, :-1].gather(2, batch.tokens_BT[:, 1:, None])[..., 0]
        logp_B = (logp_BT * batch.response_mask_BT[:, 1:]).sum(dim=1)
        total -= logp_B[batch.item_B].sum().item()
        items += int(batch.item_B.sum())
    assert bond.metric("train/nll")[1] == pytest.approx(total / items, rel=1e-4)


# Interrupted


@pytest.mark.parametrize(("name", "step"), [("rejection", 2), ("rejection", 7), ("bond", 2)])
def test_interrupted_and_resumed_it_is_the_same_run(
    name: str,
    step: int,
    request: pytest.FixtureRequest,
    start: RunStage,
    records: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    whole = request.getfixturevalue(name)
    asked = settings(REJECTION, lora=LORA) if name == "rejection" else settings(BOND)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stage", asked, interrupt_at=step)
    resumed = start(tmp_path / "stage", asked)
    assert len(resumed.updates) == len(whole.updates) - step
    for journal in ("metrics.jsonl", "samples.jsonl", "chosen.jsonl"):
        assert records(resumed.folder / journal) == records(whole.folder / journal)
    model = "model/model.safetensors"
    assert (resumed.folder / model).read_bytes() == (whole.folder / model).read_bytes()
    assert (step, "run.interrupted") in [(event["step"], event["code"]) for event in resumed.lines("events")]


def test_interrupted_in_the_last_step_of_a_round_it_stops_before_the_next(start: RunStage, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stage", settings(REJECTION, lora=LORA), interrupt_at=5)
    assert not (tmp_path / "stage/answers-2.jsonl").exists()
    assert len(start(tmp_path / "stage", settings(REJECTION, lora=LORA)).updates) == 5
