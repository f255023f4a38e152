"""What the stage hands to its parts, offline and online: every setting arrives where it belongs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from kedge.core.seeds import seed_for
from kedge.data.batching import step_rows
from kedge.models.loading.tiny import make_tiny
from kedge.models.training.train_step import learning_rate
from kedge.stages.preference import online as online_stage
from kedge.stages.preference import train as offline_stage
from kedge.stages.preference.settings import PreferenceSettings

RunStage = Callable[..., Any]
GIVEN: dict[str, Any] = {
    "kind": "preference",
    "data": "data",
    "heldout": "heldout",
    "epochs": 1.5,
    "batch": 4,
    "micro_batch": 3,
    "max_length": 90,
    "optimiser": {"lr": 3e-3, "schedule": "linear", "warmup": 0.5},
    "eval": {"every": 2},
    "checkpoints": {"every": 3},
    "samples": 1,
    "sample_tokens": 3,
}
NUM_STEPS = 5  # 1.5 passes over 12 pairs, 4 a step
ONLINE: dict[str, Any] = {
    "rounds": 2,
    "prompts": "prompts",
    "reward": {"kind": "function", "path": "rules.py:length"},
    "answers": 3,
    "finished": False,
    "max_prompt_tokens": 50,
    "sampling": {"max_new_tokens": 4},
}
OFFLINE = {"lora": {"rank": 3, "dropout": 0.2}}
OWN_PAIRS: dict[str, Any] = {"data": None, "heldout": None, "heldout_share": 0.3, "epochs": 2, "lora": {"rank": 3}}
OWN_PAIRS["checkpoints"] = {"every": 1}
BY_ROUND = {**OWN_PAIRS, "online": {**ONLINE, "reference": "round"}}
RULES = "def length(answer):\n    return float(sum(map(ord, answer.text)))\n"


def settings(**changes: Any) -> PreferenceSettings:
    return PreferenceSettings.model_validate({**GIVEN, **changes})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model has dropout of its own, which must not be there while preferences are learnt."""
    home = tmp_path_factory.mktemp("preference")
    make_tiny(home / "tiny", hidden=32, layers=1)
    config = home / "tiny/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.5}))
    for name, count in (("T", 12), ("H", 4)):
        rows = [
            {"prompt": f"{name}{number:02d}?", "chosen": f"{number}yes", "rejected": f"{number}no"}
            for number in range(count)
        ]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"P{number:02d}?"}) + "\n" for number in range(9))
    )
    return home


@pytest.fixture(scope="module")
def start(home: Path, run_recorded: RunStage, tmp_path_factory: pytest.TempPathFactory) -> RunStage:
    def run(folder: Path, asked: PreferenceSettings, **options: Any) -> Any:
        (folder.parent / "rules.py").write_text(RULES)
        paths = {"from": "tiny", "data": "T.jsonl", "heldout": "H.jsonl", "online.prompts": "prompts.jsonl"}
        own = {name: str(home / file) for name, file in paths.items() if getattr(asked, name, name) is not None}
        return run_recorded(folder, offline_stage.train, asked, **own, **options)

    return run


@pytest.fixture(scope="module")
def once(start: RunStage, tmp_path_factory: pytest.TempPathFactory) -> RunStage:
    """A run that nothing interrupts, made once for each set of settings."""
    made: dict[str, Any] = {}

    def run(**changes: Any) -> Any:
        key = json.dumps(changes)
        if key not in made:
            made[key] = start(tmp_path_factory.mktemp("whole") / "stage", settings(**changes))
        return made[key]

    return run


@pytest.fixture(scope="module")
def dpo(once: RunStage) -> Any:
    return once(**OFFLINE)


@pytest.fixture(scope="module")
def online(once: RunStage) -> Any:
    return once(**BY_ROUND)


def numbers(recorded: Any, batches: list[Any], name: str = "T") -> list[int]:
    joined = b"".join(recorded.texts(batches))
    return [number for number in range(12) if f"{name}{number:02d}?".encode() in joined]


def all_batches(parts: list[list[Any]]) -> list[Any]:
    return [batch for batches in parts for batch in batches]


# Offline


def test_epochs_batch_and_seed_make_the_steps(dpo: Any) -> None:
    assert list(dpo.metric("train/loss")) == [1, 2, 3, 4, 5]
    order = step_rows(12, epochs=1.5, batch=4, seed=3)
    assert [numbers(dpo, batches) for batches in dpo.updates] == [sorted(rows) for rows in order]


def test_few_pairs_are_in_memory_at_once(dpo: Any) -> None:
    assert [batch.num_answers for batch in dpo.updates[0]] == [6, 2]
    assert [batch.num_answers for batch in dpo.evaluations[0]] == [8]  # without gradients more fit


def test_held_out_pairs_are_evaluated_and_never_learnt(dpo: Any) -> None:
    assert list(dpo.metric("heldout/loss")) == [0, 2, 4, 5]
    learnt = b"".join(text for batches in dpo.updates for text in dpo.texts(batches))
    assert b"T03?" in learnt
    assert b"H" not in learnt
    for batches in dpo.evaluations:
        assert numbers(dpo, batches, "H") == [0, 1, 2, 3]
        assert numbers(dpo, batches) == []


def test_it_is_saved_as_often_as_asked_and_at_its_best(dpo: Any) -> None:
    losses = {step: loss for step, loss in dpo.metric("heldout/loss").items() if step}
    best = [step for step in losses if losses[step] == min(losses[at] for at in losses if at <= step)]
    assert dpo.checkpoints() == sorted({3, 5, *best})


def test_adapters_learn_at_the_scheduled_rate(dpo: Any) -> None:
    weights = dpo.learners[0].state()["weights"]
    assert weights
    assert all(".lora_" in name and 3 in weight.shape for name, weight in weights.items())
    rates = [learning_rate(settings().optimiser, step, NUM_STEPS) for step in range(1, NUM_STEPS + 1)]
    assert list(dpo.metric("train/lr").values()) == rates


def test_the_dropout_of_the_model_is_off_while_preferences_are_learnt(once: RunStage) -> None:
    """Before anything is learnt the policy is the reference, and with dropout it would not be."""
    recorded = once(epochs=0.3, samples=0)
    assert recorded.metric("train/loss")[1] == pytest.approx(math.log(2), rel=1e-5)
    assert recorded.metric("heldout/loss")[0] == pytest.approx(math.log(2), rel=1e-5)


def test_patience_ends_it(once: RunStage) -> None:
    rates = {"lr": 3.0, "schedule": "constant", "warmup": 0.0}
    recorded = once(optimiser=rates, eval={"every": 1, "patience": 1}, samples=0)
    assert len(recorded.updates) < NUM_STEPS


def test_kto_asks_the_policy_as_it_is_for_its_reference_point(once: RunStage) -> None:
    """Evaluated twice, the same held-out answers have another reference point: the weights have changed."""
    recorded = once(method="kto", samples=0)
    anchors = [batches[0].anchor.item() for batches in recorded.evaluations]
    assert anchors[0] == pytest.approx(0, abs=1e-4)
    assert len({round(anchor, 4) for anchor in anchors}) == len(anchors)
    trained = [batches[0].anchor.item() for batches in recorded.updates]
    assert len({round(anchor, 4) for anchor in trained}) == len(trained)


# Online


def steps_of_rounds(recorded: Any) -> list[list[list[Any]]]:
    learners = list(dict.fromkeys(map(id, recorded.learners)))
    steps = list(zip(map(id, recorded.learners), recorded.updates, strict=True))
    return [[batches for learner, batches in steps if learner == own] for own in learners]


def test_each_round_goes_on_where_the_one_before_ended(online: Any) -> None:
    first, second = map(len, steps_of_rounds(online))
    assert list(online.metric("train/loss")) == list(range(1, first + second + 1))
    assert list(online.metric("online/round").items()) == [(0, 0), (first, 1), (first + second, -1)]
    evaluated = [step for step in range(1, first + 1) if step % 2 == 0 or step == first]
    evaluated += [first + step for step in range(1, second + 1) if step % 2 == 0 or step == second]
    assert sorted({*online.metric("heldout/loss")} - {0}) == evaluated
    assert online.checkpoints() == list(range(1, first + second + 1))


def test_each_round_has_an_order_of_its_own(online: Any) -> None:
    for number, steps in enumerate(steps_of_rounds(online)):
        pairs = [json.loads(line) for line in (online.folder / f"pairs-{number + 1}.jsonl").read_text().splitlines()]
        prompts = [int(pair["prompt"][0]["content"][1:3]) for pair in pairs if not pair["held_out"]]
        order = step_rows(len(prompts), epochs=2, batch=4, seed=seed_for(3, "order", number))
        learnt = [numbers(online, batches, "P") for batches in steps]
        assert learnt == [sorted({prompts[row] for row in rows}) for rows in order]
        held_out = {int(pair["prompt"][0]["content"][1:3]) for pair in pairs if pair["held_out"]}
        assert held_out
        assert not held_out & {number for rows in learnt for number in rows}
        if number == 0:  # those of the first round are held out throughout
            evaluated = [set(numbers(online, batches, "P")) for batches in online.evaluations]
            assert all(prompts_of_evaluation == held_out for prompts_of_evaluation in evaluated)
    assert list(dict.fromkeys(online.seeds)) == [seed_for(3, "dropout", number) for number in (0, 1)]


def test_the_reference_of_a_round_is_known_by_its_adapters(online: Any, once: RunStage) -> None:
    """Two rounds have the same base: without the adapters in the key, one would read the log-probs of the other."""
    of_start = once(**OWN_PAIRS, online=ONLINE)
    weights: list[list[str]] = []
    for recorded in (online, of_start):
        files = [safe_open(recorded.folder / f"reference-{number}.safetensors", framework="pt") for number in (1, 2)]
        weights.append([file.metadata()["weights"] for file in files])
    assert len({*weights[0], *weights[1]}) == 3  # both rounds of `round`, and the base of `start`
    assert weights[1][0] == weights[1][1]


def test_online_too_the_dropout_of_the_model_is_off(online: Any) -> None:
    assert online.metric("train/loss")[1] == pytest.approx(math.log(2), rel=1e-4)


def test_displacement_is_looked_for_at_each_evaluation_of_answers_from_a_file(
    start: RunStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[tuple[int, float]] = []

    def note(_: Any, chosen_logp: float, *, step: int) -> None:
        checked.append((step, chosen_logp))

    for stage in (offline_stage, online_stage):
        monkeypatch.setattr(stage, "warn_of_displacement", note)
    mixed = start(tmp_path / "mixed", settings(samples=0, online={**ONLINE, "rounds": 1}))
    offline = start(tmp_path / "offline", settings(samples=0))
    expected = [item for run in (mixed, offline) for item in run.metric("heldout/chosen_logp").items() if item[0]]
    assert checked == expected
    assert len(expected) > 4
    start(tmp_path / "own", settings(**{**OWN_PAIRS, "epochs": 1}, online={**ONLINE, "rounds": 1}))
    assert checked == expected


# Interrupted


@pytest.mark.parametrize("name", ["dpo", "online"])
def test_interrupted_and_resumed_it_is_the_same_run(
    name: str,
    request: pytest.FixtureRequest,
    start: RunStage,
    records: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    whole = request.getfixturevalue(name)
    asked = settings(**(OFFLINE if name == "dpo" else BY_ROUND))
    step = 2 if name == "dpo" else len(steps_of_rounds(whole)[0]) + 1
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stage", asked, interrupt_at=step)
    resumed = start(tmp_path / "stage", asked)
    assert len(resumed.updates) == len(whole.updates) - step
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(resumed.folder / journal) == records(whole.folder / journal)
    model = "model/model.safetensors"
    assert (resumed.folder / model).read_bytes() == (whole.folder / model).read_bytes()
    assert (step, "run.interrupted") in [(event["step"], event["code"]) for event in resumed.lines("events")]


def test_interrupted_in_the_last_step_of_a_round_it_stops_before_the_next(
    online: Any, start: RunStage, tmp_path: Path
) -> None:
    first, second = map(len, steps_of_rounds(online))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "stage", settings(**BY_ROUND), interrupt_at=first)
    assert not (tmp_path / "stage/answers-2.jsonl").exists()
    assert len(start(tmp_path / "stage", settings(**BY_ROUND)).updates) == second
