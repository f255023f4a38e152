"""Online preference: which pairs a round makes, what is written and told, and that a run taken up again is the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kedge.core.errors import ConfigError, DataError
from kedge.data.batching import TokenSequence
from kedge.data.examples import Message, Origin, Pair, Prompt
from kedge.data.reading import load
from kedge.models.training.train_step import TrainStep
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.rollout.local import LocalGenerator
from kedge.stages.preference import online as online_training
from kedge.stages.preference.online_pairs import (
    RoundPairs,
    drawn_beside,
    pairs_of,
    preferences_of,
    prompt_key_of,
    write_pairs,
)
from kedge.stages.preference.online_settings import OnlineSettings
from kedge.stages.preference.preferences import Preference
from kedge.stages.preference.settings import STAGE as STAGE_OF
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.rl.answers import ScoredAnswer
from kedge.stages.rl.prompts import PromptDataset

Records = Callable[[Path], list[dict[str, Any]]]
RunStage = Callable[..., Path]
RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8

def odd(answer):
    return len(answer.text) % 2

def same(answer):
    return 1.0
"""
ONLINE: dict[str, Any] = {
    "rounds": 2,
    "reward": {"kind": "function", "path": "rules.py:plain"},
    "gold": {"kind": "function", "path": "rules.py:odd"},
    "answers": 3,
    "finished": False,
    "max_prompt_tokens": 40,
    "sampling": {"max_new_tokens": 6},
    "rows": 3,
}
STAGE: dict[str, Any] = {
    "kind": "preference",
    "batch": 4,
    "micro_batch": 2,
    "epochs": 2,
    "heldout_share": 0.2,
    "max_length": 64,
    "samples": 2,
    "optimiser": {"lr": 1e-2},
    "eval": {"every": 2},
    "checkpoints": {"every": 2, "keep": 9},
}
START = {"kto": 0.5, "tdpo": math.log(2)}
"""What a loss is before anything is learnt, as far as it can be known."""
DROPOUT = {"rank": 2, "dropout": 0.3}


@pytest.fixture(scope="session")
def run_stage(ppo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> RunStage:
    """A run of one online stage below a folder, with a cache of its own; gives the folder of the stage."""

    def run(place: Path, *, resumed: bool = False, online: dict[str, Any] | None = None, **settings: Any) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        (place / "rules.py").write_text(RULES)
        asked = {**ONLINE, "prompts": str(ppo_home / "prompts.jsonl"), **(online or {})}
        recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(ppo_home / "tiny"), "device": "cpu"}
        stages = {"train": {**STAGE, "online": asked, **settings}}
        (place / "recipe.yaml").write_text(json.dumps({**recipe, "stages": stages}))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("KEDGE_CACHE", str(place / "cache"))
            made = run_recipe(load_recipe(place / "recipe.yaml"), place / "runs", is_resumed=resumed, say=print)
        return made / "train"

    return run


@pytest.fixture(scope="session")
def whole(run_stage: RunStage, tmp_path_factory: pytest.TempPathFactory) -> RunStage:
    """A run that nothing interrupted, made once for each set of settings."""
    made: dict[str, Path] = {}

    def run(**settings: Any) -> Path:
        key = json.dumps(settings)
        if key not in made:
            made[key] = run_stage(tmp_path_factory.mktemp("whole"), **settings)
        return made[key]

    return run


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def best_and_worst(file: Path) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """By prompt, the first of the highest and the first of the lowest, where they differ."""
    by_prompt: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(file):
        by_prompt.setdefault(row["prompt"], []).append(row)
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for prompt, rows in sorted(by_prompt.items()):
        scores = [row["score"] for row in rows]
        if max(scores) > min(scores):
            found[prompt] = rows[scores.index(max(scores))], rows[scores.index(min(scores))]
    return found


# Pairs on paper


def drawn(prompt: int, *scores: float, texts: Sequence[str] = "abcdef", cut: str = "") -> list[ScoredAnswer]:
    """Answers `a`, `b`, … with these scores; those named in `cut` did not end by themselves."""
    return [
        ScoredAnswer(
            prompt=prompt,
            number=number,
            tokens=(100 + number, 9),
            text=text.strip("_"),
            is_finished=text not in cut,
            score=score,
            gold=None,
            kl=None,
        )
        for number, (score, text) in enumerate(zip(scores, texts, strict=False))
    ]


def online(**given: Any) -> OnlineSettings:
    return OnlineSettings.model_validate({"prompts": "p.jsonl", "reward": "reward", **given})


def told(made: RoundPairs) -> list[tuple[int, str, str]]:
    return [(pair.chosen.prompt, pair.chosen.text, pair.rejected.text) for pair in made.pairs]


def test_the_best_is_chosen_and_the_worst_rejected_and_what_makes_no_pair_is_counted() -> None:
    groups = [
        drawn(3, 1.0, 3.0, -2.0, 0.5),
        drawn(1, 2.0, math.nan, 5.0, 2.0),  # the first of the lowest
        drawn(0, 1.5, 1.5, 1.5),
        drawn(2, math.nan, 4.0, math.nan),
        drawn(4, 0.0, 1.0, 2.0, cut="abc"),
        drawn(5, 0.0, 1.0, 2.0, cut="c"),  # the best of those that ended
        drawn(6, 1.0, 0.0, texts="aa"),
        drawn(7, 0.0, 3.0, 1.0, texts="_ab"),  # an answer without words is no side
        drawn(8, 1.0, 2.0, 3.0, cut="bc"),  # the only one that ended is the worst
        drawn(9, 2.0, 1.0, 0.0, cut="c"),  # one that was cut off may be rejected
    ]
    made = pairs_of(groups, online())
    assert told(made) == [(1, "c", "a"), (3, "b", "c"), (5, "b", "a"), (7, "a", "b"), (9, "a", "c")]
    assert made.without == {
        "score all answers that may be chosen alike": 2,
        "have fewer than two answers with words and a score": 1,
        "have no answer that ended by itself": 1,
        "have two scores for the same words": 1,
    }
    assert made.left_out == {"answers without words": 1, "pairs of the same words": 1}
    assert told(pairs_of(groups[4:6], online(finished=False))) == [(4, "c", "a"), (5, "c", "a")]


def test_all_pairs_are_those_whose_scores_differ() -> None:
    made = pairs_of([drawn(0, 1.0, 3.0, 1.0, cut="b"), drawn(1, 2.0, 1.0, 0.0, cut="a")], online(pairs="all"))
    assert told(made) == [(1, "b", "c")]
    made = pairs_of([drawn(0, 1.0, 3.0, 1.0), drawn(1, 2.0, 1.0, 0.0)], online(pairs="all", finished=False))
    assert told(made) == [(0, "b", "a"), (0, "b", "c"), (1, "a", "b"), (1, "a", "c"), (1, "b", "c")]


def book_of(*prompts: str) -> PromptDataset:
    asked = [Prompt(prompt=(Message("user", one),), origin=Origin("here", 1)) for one in prompts]
    return PromptDataset(prompts=asked, tokens=[[7, 8 + n] for n in range(len(asked))], batch=1, answers=1, seed=0)


def test_what_was_sampled_is_learnt_token_for_token() -> None:
    made = pairs_of([drawn(1, 1.0, 3.0)], online())
    (pair,) = preferences_of(made.pairs, book_of("One?", "Two?"), as_thumbs=False)
    chosen = TokenSequence(tokens=[7, 9, 101, 9], counted=[False, False, True, True])
    rejected = TokenSequence(tokens=[7, 9, 100, 9], counted=[False, False, True, True])
    assert pair.answers.sequences == (chosen, rejected)
    assert pair.answers.is_good == (True, False)
    liked, disliked = preferences_of(made.pairs, book_of("One?", "Two?"), as_thumbs=True)
    assert (liked.answers.sequences, liked.answers.is_good) == ((chosen,), (True,))
    assert (disliked.answers.sequences, disliked.answers.is_good) == ((rejected,), (False,))
    assert liked.prompt_key == disliked.prompt_key == pair.prompt_key


def test_the_file_of_pairs_passes_the_check_of_data(tmp_path: Path, kedge: Callable[..., int]) -> None:
    texts = ("It ships on Monday.", "Look it up.", "Monday, thank you!")
    made = pairs_of([drawn(n, 1.0, -n - 1.0, 2.0 + n, texts=[f"{t} {n}" for t in texts]) for n in range(3)], online())
    book, file = book_of("Which day?", "When?", "Is it soon?"), tmp_path / "pairs.jsonl"
    write_pairs(made.pairs, book, file, held_out=frozenset({prompt_key_of(made.pairs[1], book)}))
    rows = rows_of(file)
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(2.0, -1.0), (3.0, -2.0), (4.0, -3.0)]
    assert [row["held_out"] for row in rows] == [False, True, False]
    found = [one.chosen[0].content for one in load(file, kind="pairs") if isinstance(one, Pair)]
    assert found == [f"Monday, thank you! {n}" for n in range(3)]
    assert kedge("data", "check", file) == 0


def test_given_pairs_come_in_an_order_of_their_own_in_each_round_and_none_twice_before_all() -> None:
    given = [Preference(answers=None, prompt=(), prompt_key=key) for key in range(5)]  # pyright: ignore[reportArgumentType]
    first = [preference.prompt_key for preference in drawn_beside(given, 8, seed=3, number=0)]
    assert sorted(first[:5]) == [0, 1, 2, 3, 4]
    assert len(set(first[5:])) == 3
    assert first == [preference.prompt_key for preference in drawn_beside(given, 8, seed=3, number=0)]
    assert first != [preference.prompt_key for preference in drawn_beside(given, 8, seed=3, number=1)]
    assert drawn_beside([], 4, seed=3, number=0) == []


# Whole runs


def test_each_round_draws_from_the_policy_as_it_is_and_writes_its_pairs(whole: RunStage) -> None:
    stage = whole(method="dpo")
    rounds = [one for one in rows_of(stage / "metrics.jsonl") if "online/round" in one]
    assert [one["online/round"] for one in rounds] == [0, 1, -1]
    for number, line in ((1, rounds[0]), (2, rounds[1])):
        sides = best_and_worst(stage / f"answers-{number}.jsonl")
        pairs = rows_of(stage / f"pairs-{number}.jsonl")
        assert len(pairs) > 5
        assert [(row["chosen_score"], row["rejected_score"]) for row in pairs] == [
            (chosen["score"], rejected["score"]) for chosen, rejected in sides.values()
        ]
        answers = rows_of(stage / f"answers-{number}.jsonl")
        assert line["online/pairs"] == len(pairs)
        assert line["online/without"] == pytest.approx((10 - len(pairs)) / 10)
        assert line["reward/mean"] == pytest.approx(sum(row["score"] for row in answers) / 30)
        assert line["gold/mean"] == pytest.approx(sum(row["gold"] for row in answers) / 30)
        assert {"heldout/loss", "heldout/accuracy", "heldout/chosen_drift"} <= set(line)
    assert rounds[0]["kl/mean"] == 0
    assert rounds[0]["heldout/loss"] == pytest.approx(math.log(2), rel=1e-5)
    told_kl = [row["kl"] for row in rows_of(stage / "answers-2.jsonl")]
    assert rounds[1]["kl/mean"] == pytest.approx(sum(told_kl) / 30)
    assert rounds[2]["kl/mean"] > 0.05
    assert rounds[2]["reward/mean"] > rounds[0]["reward/mean"]
    samples = rows_of(stage / "samples.jsonl")
    assert [(one["step"], one["number"]) for one in samples] == [(one["step"], n) for one in rounds for n in (0, 1)]


def test_the_pairs_are_a_preference_file_with_held_out_prompts_marked(whole: RunStage) -> None:
    stage = whole(method="dpo")
    file = stage / "pairs-2.jsonl"
    found = load(file, kind="pairs")
    sides = best_and_worst(stage / "answers-2.jsonl")
    asked = {number: f"Say {'abcdefghij'[number] * (number % 3 + 1)}" for number in range(10)}
    for pair, (prompt, (chosen, rejected)) in zip(found, sides.items(), strict=True):
        assert isinstance(pair, Pair)
        assert (pair.prompt[0].content, pair.chosen[0].content) == (asked[prompt], chosen["text"])
        assert pair.rejected[0].content == rejected["text"]
    marked = [
        {row["prompt"][0]["content"] for row in rows_of(stage / f"pairs-{n}.jsonl") if row["held_out"]} for n in (1, 2)
    ]
    assert len(marked[0]) == 2  # a fifth of the ten prompts
    assert marked[1] <= marked[0]
    events = [one["message"] for one in rows_of(stage / "events.jsonl") if one["code"] == "preference.pairs"]
    assert events[1].startswith(f"round 2: {len(found) - len(marked[1])} pairs to learn")
    assert f"{len(marked[1])} to held-out prompts" in events[1]


@pytest.mark.parametrize("method", ["kto", "simpo", "tdpo"])
def test_other_methods_learn_from_the_same_answers(whole: RunStage, method: str) -> None:
    stage = whole(method=method, online={"rounds": 1})
    first, step, *_, last = rows_of(stage / "metrics.jsonl")
    if method in START:
        assert step["train/loss"] == pytest.approx(START[method], rel=1e-5)
    assert last["reward/mean"] > first["reward/mean"]
    assert rows_of(stage / "pairs-1.jsonl") == rows_of(whole(method="dpo") / "pairs-1.jsonl")
    assert (stage / "reference-1.safetensors").exists() == (method != "simpo")


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_reference_may_be_the_policy_of_the_round(whole: RunStage, lora: dict[str, Any] | None) -> None:
    """Each round then begins with a margin of nothing; held to the start, the second begins where the first ended."""
    for reference, is_new in (("start", False), ("round", True)):
        settings = {"method": "dpo", "online": {"reference": reference}, "lora": lora}
        rounds = [one for one in rows_of(whole(**settings) / "metrics.jsonl") if one.get("online/round") == 1]
        assert (abs(rounds[0]["heldout/margin"]) < 1e-5) is is_new
        assert rounds[0]["kl/mean"] > 0.001  # from the start in both


def test_given_pairs_are_learnt_beside_new_ones(run_stage: RunStage, tmp_path: Path) -> None:
    rows = [{"prompt": f"Is it {n}?", "chosen": f"Yes, {n}.", "rejected": "No."} for n in range(9)]
    rows[8]["prompt"] = "Say a"
    file, held = tmp_path / "given.jsonl", tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    held.write_text("".join(json.dumps(row) + "\n" for row in rows[6:]))
    online = {"rounds": 1, "offline": 0.5}
    stage = run_stage(tmp_path / "run", online=online, data=str(file), heldout=str(held))
    pairs = rows_of(stage / "pairs-1.jsonl")
    new = [row for row in pairs if row["prompt"][0]["content"] != "Say a"]
    assert [row["held_out"] for row in pairs] == [row not in new for row in pairs]
    told = [one["message"] for one in rows_of(stage / "events.jsonl")]
    assert "6 pairs to learn, 3 held out by prompt" in told
    beside = round(0.5 * len(new))
    words = f"round 1: {len(new)} pairs to learn, {len(pairs) - len(new)} to held-out prompts, "
    assert any(one.startswith(f"{words}{beside} of `data` beside them") for one in told)
    steps = [one["step"] for one in rows_of(stage / "metrics.jsonl") if "train/loss" in one]
    assert len(steps) == math.ceil(2 * (len(new) + beside) / 4)


def test_without_a_pair_it_says_why(run_stage: RunStage, tmp_path: Path) -> None:
    same = {"reward": {"kind": "function", "path": "rules.py:same"}}
    why = "no pair can be made of the first answers: 10 prompts score all answers that may be chosen alike"
    with pytest.raises(DataError, match=why):
        run_stage(tmp_path, online=same)


def test_a_later_round_without_a_pair_ends_the_run_well(
    run_stage: RunStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = RoundPairs(pairs=(), without={"score all answers that may be chosen alike": 10}, left_out={})

    def first_round_alone(groups: Any, online: OnlineSettings) -> RoundPairs:
        return nothing if groups[0][0].kl else pairs_of(groups, online)  # the first answers are of the start itself

    monkeypatch.setattr(online_training, "pairs_of", first_round_alone)
    stage = run_stage(tmp_path, online={"rounds": 4})
    rounds = [one for one in rows_of(stage / "metrics.jsonl") if "online/round" in one]
    assert [(one["online/round"], one.get("online/pairs")) for one in rounds] == [(0, 10), (1, 0), (-1, None)]
    (told,) = [one for one in rows_of(stage / "events.jsonl") if one["code"] == "preference.no_pairs"]
    assert told["message"] == (
        "round 2: 0 pairs to learn; 10 prompts score all answers that may be chosen alike: training ends here"
    )
    assert (stage / "model/model.safetensors").exists()


# Taken up again


class Fallen(Exception):
    pass


def falls(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    calls = iter(range(1, 9999))

    def function(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == call:
            raise Fallen
        return real(*arguments, **settings)

    return function


@pytest.mark.parametrize(
    ("settings", "owner", "name", "call"),
    [
        ({"method": "dpo"}, LocalGenerator, "generate", 1),  # before anything is drawn
        pytest.param({"method": "dpo"}, TrainStep, "learn", 2, marks=pytest.mark.slow),  # before the first checkpoint
        ({"method": "dpo"}, TrainStep, "learn", 4),  # in the first round, behind a checkpoint
        ({"method": "dpo"}, online_training, "save_round", 1),  # the round is learnt and not yet kept
        pytest.param(
            {"method": "dpo"}, online_training, "write_pairs", 2, marks=pytest.mark.slow
        ),  # the second is drawn
        ({"method": "dpo"}, TrainStep, "learn", 5),  # the second round is told, and nothing of it saved
        pytest.param({"method": "dpo"}, TrainStep, "learn", 7, marks=pytest.mark.slow),  # in the second round
        pytest.param({"method": "dpo"}, online_training, "log_trained_policy", 1, marks=pytest.mark.slow),
        ({"method": "dpo", "online": {"reference": "round"}, "lora": DROPOUT}, online_training, "write_pairs", 2),
    ],
)
def test_taken_up_again_it_is_the_same_run(
    settings: dict[str, Any],
    owner: Any,
    name: str,
    call: int,
    whole: RunStage,
    run_stage: RunStage,
    records: Records,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, falls(getattr(owner, name), call))
        with pytest.raises(Fallen):
            run_stage(tmp_path, **settings)
    found, expected = run_stage(tmp_path, resumed=True, **settings), whole(**settings)
    for journal in ("metrics.jsonl", "samples.jsonl", "pairs-1.jsonl", "pairs-2.jsonl"):
        assert records(found / journal) == records(expected / journal)
    assert len(records(expected / "metrics.jsonl")) > 8
    model = "model/model.safetensors"
    assert (found / model).read_bytes() == (expected / model).read_bytes()


# Settings


def settings(online: dict[str, Any], **given: Any) -> PreferenceSettings:
    asked = {"prompts": "p.jsonl", "reward": "reward", **online}
    return PreferenceSettings.model_validate({"kind": "preference", "online": asked, **given})


@pytest.mark.parametrize(
    ("online", "given", "told"),
    [
        ({"sampling": {"max_new_tokens": 600}}, {}, r"may have 1,112 tokens .* and max_length is 1,024"),
        ({"pairs": "all"}, {"method": "kto"}, "kto learns from single answers: take 'best_worst'"),
        ({"reference": "round"}, {"method": "simpo"}, "method 'simpo' has no reference: leave it out"),
        ({"reference": "round"}, {"method": "tdpo", "lora": {}}, "take 'start', or train without lora"),
    ],
)
def test_what_does_not_go_together_is_refused(online: dict[str, Any], given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(online, **given)


def test_there_must_be_something_to_learn_from() -> None:
    with pytest.raises(ValidationError, match=r"give `data` \(a file of preferences\), `online`, or both"):
        PreferenceSettings.model_validate({"kind": "preference"})


def test_a_misspelt_way_to_pair_is_told_with_the_nearest(tmp_path: Path) -> None:
    text = "kedge: 1\nname: a\nseed: 1\nmodel: tiny\nstages:\n  dpo:\n    kind: preference\n    online:\n"
    file = tmp_path / "a.yaml"
    file.write_text(text + "      prompts: p.jsonl\n      reward: r\n      pairs: best_wrost\n      rouds: 2\n")
    with pytest.raises(ConfigError) as found:
        load_recipe(file)
    assert "line 11: stages.dpo.online.pairs: must be 'best_worst' or 'all', found 'best_wrost'" in str(found.value)
    assert "(did you mean 'best_worst'?)" in str(found.value)
    assert "stages.dpo.online.rouds: not a setting here (did you mean 'rounds'?)" in str(found.value)


def test_the_arithmetic_in_words() -> None:
    assert STAGE_OF.explain(settings({"answers": 5}, batch=16)) == [
        "3 rounds of 5 answers of the policy to each prompt, which make at most 1 pair a prompt",
        "each optimiser step: 16 pairs, in passes of at most N tokens, chosen at the start; 1 pass over the data of a "
        "round",
        "dpo: the reference is asked once a round, before it is learnt, and its log-probs are kept",
    ]
    mixed = STAGE_OF.explain(settings({"rounds": 1, "pairs": "all", "offline": 0.25}, data="pairs.jsonl"))
    assert mixed[0] == "1 round of 4 answers of the policy to each prompt, which make at most 6 pairs a prompt"
    assert mixed[1] == "beside each new pair 0.25 of `data`, drawn anew in each round"


def test_answers_that_are_all_the_same_are_refused() -> None:
    (found,) = STAGE_OF.check(settings({"sampling": {"top_k": 1}}))
    assert (found.level, found.code, found.where) == ("fatal", "preference.greedy", "online.sampling.top_k")
    assert list(STAGE_OF.check(settings({}))) == []
