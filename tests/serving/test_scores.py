"""A served reward model is a reward source of kind `http`, and its scores are those of `kedge score`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import TOKEN, served

from kedge.commands import score as scoring
from kedge.commands.serve import Service, Serving, open_service
from kedge.core.answers import Answer
from kedge.core.errors import ConfigError
from kedge.data.examples import Message
from kedge.data.template import template_hash
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import Normaliser
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, unscored
from kedge.rewards.http import make
from kedge.rewards.settings import HttpSource
from kedge.serving.score_app import score_app
from kedge.stages.rl.scoring import score_sequences

ROWS = [("Which day?", "It ships Friday."), ("Is it red?", "Yes."), ("How?", "Ask! " * 40), ("Why?", "")]


def reward_folder(folder: Path, objectives: tuple[str, ...] = ("reward",)) -> str:
    made = build(make_tiny(), objectives=objectives, seed=3, dtype="float32")
    normaliser = Normaliser(mean=(0.5, 1.5)[: len(objectives)], std=(2.0, 4.0)[: len(objectives)])
    facts = replace(made.facts, normaliser=normaliser, template_hash=template_hash(made.tokenizer), max_length=96)
    save(replace(made, facts=facts), folder / "model")
    return str(folder)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    return reward_folder(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def service(reward: str) -> Service:
    return open_service(Serving(model=reward, device="cpu"), say=print)


def scores_of_the_command(reward: str, folder: Path) -> list[float]:
    rows = [{"prompt": prompt, "completion": answer, "label": True} for prompt, answer in ROWS]
    file = folder / "thumbs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = scoring.load_judge(reward, device="cpu")
    answers = scoring.read_answers(str(file), "thumbs", judge, beside=folder / "out.jsonl")
    return scoring.score_answers(judge, answers, is_raw=False)[0, :, 0].tolist()


def test_a_reward_source_reads_its_scores(
    service: Service, reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_TOKEN", TOKEN)
    answers = [Answer(prompt=(("user", prompt),), text=text, is_finished=True) for prompt, text in ROWS]
    with served(service) as server:
        fields = {"kind": "http", "url": f"{server.url}/score", "key_variable": "KEDGE_TOKEN", "batch": 3, "retries": 0}
        source = make(HttpSource.model_validate(fields), RewardContext(folder=tmp_path, seed=1))
        scores = source.score(answers)
    assert scores[:3] == pytest.approx(scores_of_the_command(reward, tmp_path)[:3], abs=1e-6)
    assert len({round(score, 4) for score in scores}) == 4


def test_an_answer_without_a_score_is_null_and_the_others_have_theirs() -> None:
    def compute(kind: Any, batch: Sequence[Sequence[Answer]]) -> list[list[ScoreResult]]:
        return [[unscored("too odd") if answer.text == "odd" else ScoreResult(1.5) for answer in row] for row in batch]

    answers = [{"prompt": [{"role": "user", "content": "Hi"}], "answer": text} for text in ("a", "odd", "b")]
    with served(Service(compute=compute, rows=8, make_app=score_app, scores=True)) as server:
        assert server.post("/score", answers=answers).json() == {"scores": [1.5, None, 1.5]}
        assert server.post("/score", answers=[]).json() == {"scores": []}


def test_wrong_requests_for_scores_are_refused(service: Service) -> None:
    good = {"prompt": [{"role": "user", "content": "Hi"}], "answer": "Yes."}
    with served(service) as server:
        wrong = {
            "'answers.0.anser' is not a field of this request (did you mean 'answer'?)": [good | {"anser": "Yes"}],
            "'answers.0.answer'": [good | {"answer": None}],
            "known roles": [good | {"prompt": [{"role": "wizard", "content": "Hi"}]}],
        }
        for words, answers in wrong.items():
            reply = server.post("/score", answers=answers)
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]
        assert server.post("/v1/chat/completions", model="tiny", messages=[]).status_code == 404


def test_of_several_objectives_one_must_be_named(tmp_path: Path) -> None:
    place = reward_folder(tmp_path, ("helpful", "harmless"))
    with pytest.raises(ConfigError, match="helpful, harmless"):
        open_service(Serving(model=place, device="cpu"), say=print)
    service = open_service(Serving(model=place, device="cpu", objective="harmless"), say=print)
    answer = Answer(prompt=(("user", "Hi"),), text="Yes.", is_finished=True)
    ((result,),) = service.compute("score", [[answer]])
    judge = scoring.load_judge(place, device="cpu")
    tokens = judge.encoder.tokens((Message("user", "Hi"),), (Message("assistant", "Yes."),))
    expected = score_sequences(judge.members, [tokens], normalised=True)[0, 0]
    assert result.score == pytest.approx(float(expected[1]), abs=1e-6)
    assert abs(float(expected[0] - expected[1])) > 1e-3
