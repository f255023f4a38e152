"""`kedge score`: the numbers are those of plain transformers, and nothing is lost, hidden or half written."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from kedge.cli import score as command
from kedge.data.reading import load
from kedge.data.template import template_hash
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import Ensemble, save_ensemble
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import Normaliser, RewardModel
from kedge.models.settings import WorstMember

Kedge = Callable[..., Any]

ASK = [{"role": "user", "content": "Which day?"}]
PAIRS: list[dict[str, Any]] = [
    {"prompt": "Which day?", "chosen": "It ships Friday, as you know.", "rejected": "No idea."},
    {"prompt": "Is it red?", "chosen": "Yes.", "rejected": "It may be red, or blue, or something between the two."},
    {"prompt": "How much is it, please?", "chosen": "12 euro", "rejected": "Ask!", "scores": "mine", "id": 7},
    {"prompt": "And now?", "chosen": "Go left.", "rejected": "Turn it!"},
]


def reward_model(*, seed: int = 3, objectives: Sequence[str] = ("reward",), mean: float = 0.5) -> RewardModel:
    """Random weights large enough for scores to differ; each objective has a scale of its own."""
    made = build(make_tiny(), objectives=objectives, seed=seed, dtype="float32")
    normaliser = Normaliser(mean=tuple(mean + k for k in range(len(objectives))), std=(2.0, 4.0)[: len(objectives)])
    facts = replace(made.facts, normaliser=normaliser, template_hash=template_hash(made.tokenizer), max_length=192)
    return replace(made, facts=facts)


@pytest.fixture
def reward(tmp_path: Path) -> RewardModel:
    made = reward_model()
    save(made, tmp_path / "rm")
    return made


@pytest.fixture(autouse=True)
def _pairs(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", PAIRS)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[list[float]]:
    return [[answer["score"] for answer in row["scores"]] for row in rows(path)]


def by_transformers(folder: Path, prompt: str, answer: str, *, last: int = 10_000) -> list[float]:
    """The logits of one text on its own, up to and with its end-of-turn token."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"][-last:]
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].tolist()


@pytest.mark.usefixtures("reward")
def test_raw_scores_are_those_of_plain_transformers_in_the_order_of_the_file(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("score", "rm", "pairs.jsonl", "--raw")
    assert (done.code, done.err) == (0, "")
    assert "scored 8 answers of 4 pairs in pairs.jsonl, not normalised" in done.out
    assert re.search(r"^\d+ tokens in \d+\.\d s, [\d,]+ a second$", done.out, re.MULTILINE)
    for row, found in zip(PAIRS, numbers(tmp_path / "pairs.scores.jsonl"), strict=True):
        for side, one in zip(("chosen", "rejected"), found, strict=True):
            assert one == pytest.approx(by_transformers(tmp_path / "rm", row["prompt"], row[side])[0], rel=1e-4)


@pytest.mark.usefixtures("reward")
def test_scores_are_normalised_and_the_summary_counts_them(kedge: Kedge, tmp_path: Path) -> None:
    assert kedge("score", "rm", "pairs.jsonl", "--raw", "--to", "raw.jsonl").code == 0
    done = kedge("score", "rm", "pairs.jsonl", "--json")
    summary = json.loads(done.out)
    found, raw = numbers(tmp_path / "pairs.scores.jsonl"), numbers(tmp_path / "raw.jsonl")
    flat = list(chain(*found))
    assert flat == pytest.approx([(one - 0.5) / 2 for one in chain(*raw)], rel=1e-5)
    about = summary["objectives"]["reward"]
    assert (about["mean"], about["std"]) == pytest.approx((fmean(flat), pstdev(flat)), rel=1e-5)
    right = [chosen > rejected for chosen, rejected in found]
    assert 0 < sum(right) < 4
    accuracy = about["agreement"]["accuracy"]
    assert (accuracy["value"], accuracy["n"]) == (sum(right) / 4, 4)
    assert accuracy["low"] < accuracy["value"] < accuracy["high"]
    # The tiny tokenizer counts bytes: the longer answer is chosen in the first and third pair, and the last is equal.
    longer = [found[0][0] > found[0][1], found[1][1] > found[1][0], found[2][0] > found[2][1]]
    agreement = about["agreement"]
    assert (agreement["num_unequal"], agreement["longer_is_preferred"]) == (3, pytest.approx(2 / 3))
    assert agreement["longer_scores_higher"] == pytest.approx(sum(longer) / 3)
    assert (summary["examples"], summary["answers"], summary["cut"], summary["broken"]) == (4, 8, 0, 0)
    assert summary["written"] == ["pairs.scores.jsonl"]


@pytest.mark.usefixtures("reward")
def test_the_fields_of_the_file_are_kept_with_a_field_of_the_same_name(kedge: Kedge, tmp_path: Path) -> None:
    assert kedge("score", "rm", "pairs.jsonl", "--to", "out/scored.jsonl").code == 0
    row = rows(tmp_path / "out/scored.jsonl")[2]
    assert row["chosen"] == [{"role": "assistant", "content": "12 euro"}]
    assert (row["id"], row["extra"]) == (7, {"scores": "mine"})
    assert len(row["scores"]) == 2


KINDS: dict[str, dict[str, Any]] = {
    "rankings": {"prompt": ASK, "answers": ["Friday.", "No.", "Soon, I think."], "rank": [1, 2, 2]},
    "thumbs": {"prompt": ASK, "completion": "Friday.", "label": True},
    "demonstrations": {"messages": [*ASK, {"role": "assistant", "content": "Friday."}]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("reward")
def test_every_kind_is_scored_and_reads_back(kedge: Kedge, tmp_path: Path, kind: str) -> None:
    row = KINDS[kind]
    write(tmp_path / "data.jsonl", [row])
    assert kedge("score", "rm", "data.jsonl", "--raw").code == 0
    texts = row.get("answers", ["Friday."])
    expected = [by_transformers(tmp_path / "rm", "Which day?", text)[0] for text in texts]
    assert numbers(tmp_path / "data.scores.jsonl") == [pytest.approx(expected, rel=1e-4)]
    (before,), (after,) = load(tmp_path / "data.jsonl"), load(tmp_path / "data.scores.jsonl")
    assert replace(after, extra={}, origin=before.origin) == before


@pytest.mark.usefixtures("reward")
def test_rankings_are_judged_by_their_strict_preferences(kedge: Kedge, tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [KINDS["rankings"]])
    done = kedge("score", "rm", "data.jsonl", "--json")
    ((best, second, third),) = numbers(tmp_path / "data.scores.jsonl")
    accuracy = json.loads(done.out)["objectives"]["reward"]["agreement"]["accuracy"]
    assert (accuracy["n"], accuracy["value"]) == (2, ((best > second) + (best > third)) / 2)


def test_an_ensemble_gives_each_member_one_score_and_their_disagreement(kedge: Kedge, tmp_path: Path) -> None:
    names = ("helpful", "harmless")
    members = tuple(reward_model(seed=seed, objectives=names, mean=0.1 * seed) for seed in (1, 2, 9))
    save_ensemble(Ensemble(members=members, combine=WorstMember()), tmp_path / "many")
    assert kedge("score", "many", "pairs.jsonl", "--to", "many.jsonl").code == 0
    for index in range(3):
        assert kedge("score", f"many/member-{index}", "pairs.jsonl", "--to", f"{index}.jsonl").code == 0
    alone = [rows(tmp_path / f"{index}.jsonl") for index in range(3)]
    for at, row in enumerate(rows(tmp_path / "many.jsonl")):
        for answer in range(2):
            assert list(row["scores"][answer]) == list(names)
            for name in names:
                found = row["scores"][answer][name]
                each = [one[at]["scores"][answer][name]["score"] for one in alone]
                assert found["members"] == pytest.approx(each, rel=1e-5)
                assert found["score"] == pytest.approx(min(each), rel=1e-5)
                assert found["disagreement"] == pytest.approx(pstdev(each), rel=1e-4)


def test_objectives_keep_their_names(kedge: Kedge, tmp_path: Path) -> None:
    save(reward_model(objectives=("helpful", "harmless")), tmp_path / "two")
    assert kedge("score", "two", "pairs.jsonl", "--raw").code == 0
    found = rows(tmp_path / "pairs.scores.jsonl")[1]["scores"][0]
    helpful, harmless = by_transformers(tmp_path / "two", "Is it red?", "Yes.")
    assert abs(helpful - harmless) > 0.01
    assert found == {
        "helpful": {"score": pytest.approx(helpful, rel=1e-4)},
        "harmless": {"score": pytest.approx(harmless, rel=1e-4)},
    }


def test_a_report_has_one_page_an_objective(kedge: Kedge, tmp_path: Path) -> None:
    save(reward_model(objectives=("helpful", "harmless")), tmp_path / "two")
    done = kedge("score", "two", "pairs.jsonl", "--report", "pages/report.html")
    assert done.code == 0
    assert "wrote pages/report-helpful.html\nwrote pages/report-harmless.html" in done.out
    page = (tmp_path / "pages/report-harmless.html").read_text()
    assert "<title>Reward model report</title>" in page
    assert "4 held-out pairs" in page
    assert "pairs.jsonl" in page


@pytest.fixture
def runs(tmp_path: Path, reward: RewardModel) -> Path:
    run = tmp_path / "runs/a"
    shutil.copytree(tmp_path / "rm", run / "reward/model")
    shutil.copytree(make_tiny(), run / "sft/model")
    (run / "run.json").write_text(json.dumps({"kind": "pipeline"}))
    return run


def test_a_run_and_a_stage_stand_for_the_model_inside(kedge: Kedge, tmp_path: Path, runs: Path) -> None:
    assert kedge("score", "rm", "pairs.jsonl", "--to", "direct.jsonl").code == 0
    for place in ("runs/a", "runs/a/reward"):
        assert kedge("score", place, "pairs.jsonl", "--to", "found.jsonl", "--force").code == 0
        assert (tmp_path / "found.jsonl").read_text() == (tmp_path / "direct.jsonl").read_text()
    shutil.copytree(runs / "reward", runs / "second")
    done = kedge("score", "runs/a", "pairs.jsonl")
    assert done.err == "error: runs/a: holds 2 reward models; name one: runs/a/reward, runs/a/second\n"


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "start"),
    {
        "a language model": (("runs/a/sft", "pairs.jsonl"), "{tmp}/runs/a/sft/model is not a reward model but a Llama"),
        "an empty folder": (("runs", "pairs.jsonl"), "runs: no reward model here; expected a folder with config.json"),
        "nothing": (("rmm", "pairs.jsonl"), "no model named 'rmm'"),
        "prompts": (("rm", "prompts.jsonl"), "prompts.jsonl: holds prompts alone (read as prompts (prompt)), so there"),
        "another ending": (("rm", "pairs.jsonl", "--to", "a.csv"), "--to a.csv: the name must end in .jsonl"),
        "the same file": (("rm", "pairs.jsonl", "--to", "./pairs.jsonl"), "pairs.jsonl: this is what is read"),
        "no preferences": (
            ("rm", "demos.jsonl", "--report", "r.html"),
            "--report: demos.jsonl holds demonstrations; a reward model is judged on pairs",
        ),
        "no such device": (("rm", "pairs.jsonl", "--device", "gpu"), "--device gpu: there is no such device; auto"),
    }.values(),
)
def test_what_cannot_be_scored_is_refused_and_leaves_nothing(
    kedge: Kedge, tmp_path: Path, arguments: tuple[str, ...], start: str
) -> None:
    write(tmp_path / "prompts.jsonl", [{"prompt": "Which day?"}])
    write(tmp_path / "demos.jsonl", [KINDS["demonstrations"]])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = kedge("score", *arguments)
    assert done.err.startswith(f"error: {start.format(tmp=tmp_path)}"), done.err
    assert (done.code, done.out) == (2, "")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_long_texts_lose_their_beginning_as_in_training_and_are_counted(
    kedge: Kedge, tmp_path: Path, reward: RewardModel
) -> None:
    save(replace(reward, facts=replace(reward.facts, max_length=60)), tmp_path / "short")
    done = kedge("score", "short", "pairs.jsonl", "--raw")
    assert "\ntexts over 60 tokens, which lost their beginning: 1\n" in done.out
    expected = by_transformers(tmp_path / "short", "Is it red?", PAIRS[1]["rejected"], last=60)[0]
    assert numbers(tmp_path / "pairs.scores.jsonl")[1][1] == pytest.approx(expected, rel=1e-4)


def test_long_texts_are_refused_with_their_place_where_training_refused_them(
    kedge: Kedge, tmp_path: Path, reward: RewardModel
) -> None:
    save(replace(reward, facts=replace(reward.facts, max_length=60, truncate="refuse")), tmp_path / "short")
    done = kedge("score", "short", "pairs.jsonl")
    assert done.code == 2
    assert done.err.startswith("error: pairs.jsonl:2: a text of ")
    assert not (tmp_path / "pairs.scores.jsonl").exists()


@pytest.mark.usefixtures("reward")
def test_another_template_than_in_training_is_a_warning(kedge: Kedge, tmp_path: Path) -> None:
    assert "template" not in kedge("score", "rm", "pairs.jsonl").out
    template = tmp_path / "rm/chat_template.jinja"
    template.write_text("Be brief.\n" + template.read_text())
    done = kedge("score", "rm", "pairs.jsonl", "--force")
    assert done.code == 0
    assert "! rm: The chat template in this folder is not the one that the reward model was trained on" in done.out
    assert "→ put back the tokenizer files" in done.out


def test_a_pad_token_of_its_own_is_no_other_template(kedge: Kedge, tmp_path: Path, reward: RewardModel) -> None:
    pad = reward.tokenizer.pad_token
    reward.tokenizer.pad_token = reward.tokenizer.eos_token
    trained = template_hash(reward.tokenizer)
    reward.tokenizer.pad_token = pad
    assert trained == template_hash(reward.tokenizer)
    save(replace(reward, facts=replace(reward.facts, template_hash=trained)), tmp_path / "padded")
    assert json.loads(kedge("score", "padded", "pairs.jsonl", "--json").out)["findings"] == []


@pytest.mark.usefixtures("reward")
def test_broken_rows_are_set_aside_and_said(kedge: Kedge, tmp_path: Path) -> None:
    good = [json.dumps({**PAIRS[0], "prompt": f"Which {at}?"}) for at in range(120)]
    (tmp_path / "pairs.jsonl").write_text("\n".join([*good[:9], '{"prompt": "cut', *good[9:]]))
    done = kedge("score", "rm", "pairs.jsonl")
    assert "broken rows, set aside with line and reason in pairs.scores.broken.jsonl: 1\n" in done.out
    assert len(rows(tmp_path / "pairs.scores.jsonl")) == 120
    (aside,) = rows(tmp_path / "pairs.scores.broken.jsonl")
    assert (aside["file"], aside["line"]) == ("pairs.jsonl", 10)


def test_a_score_that_is_no_number_stops_before_anything_is_written(
    kedge: Kedge, tmp_path: Path, reward: RewardModel
) -> None:
    with torch.no_grad():
        next(reward.model.parameters())[ord("!")] = math.nan
    save(reward, tmp_path / "nan")
    (tmp_path / "out.jsonl").write_text("old\n")
    done = kedge("score", "nan", "pairs.jsonl", "--to", "out.jsonl", "--force")
    assert done.code == 1
    assert done.err.startswith("error: pairs.jsonl:3: the score is not a finite number, as for 2 of 8 answers")
    assert (tmp_path / "out.jsonl").read_text() == "old\n"


@pytest.mark.usefixtures("reward")
def test_a_terminal_sees_how_far_it_is(kedge: Kedge, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    monkeypatch.setattr(command, "errors_to", lambda: Console(file=screen, force_terminal=True, width=100))
    assert kedge("score", "rm", "pairs.jsonl").code == 0
    assert "8/8" in screen.getvalue()
    assert "/s" in screen.getvalue()
    assert "0:00:00" in screen.getvalue()
