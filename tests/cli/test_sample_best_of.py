"""`kedge sample --best-of`: the answer that a reward model likes best, with its score and its distance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.data.template import template_hash
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import build, save

Kedge = Callable[..., Any]
SHORT = ("--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    tiny = make_tiny(tmp_path / "model", seed=5, hidden=32)
    judge = build(tiny, seed=3, dtype="float32")
    facts = replace(judge.facts, template_hash=template_hash(judge.tokenizer), max_length=192)
    save(replace(judge, facts=facts), tmp_path / "judge")


def test_all_answers_have_scores_and_the_highest_is_the_best(kedge: Kedge, tmp_path: Path) -> None:
    asked = ("sample", "./model", "-p", "Which day?", "-p", "Hi", "--best-of", "4", "--reward", "./judge", *SHORT)
    rows = json.loads(kedge(*asked, "--json").out)
    assert [row["id"] for row in rows] == [f"{prompt}-{number}" for prompt in "01" for number in range(4)]
    for part in (rows[:4], rows[4:]):
        (best,) = [row for row in part if row["best"]]
        assert best["score"] == max(row["score"] for row in part)
        assert len({row["score"] for row in part}) == 4
        assert best["kl"] == pytest.approx(math.log(4) - 3 / 4)
    shown = kedge(*asked)
    assert (shown.code, shown.err) == (0, "")
    best = [row for row in rows if row["best"]]
    assert shown.out.count("the best of 4: 0.64 nats from one answer, at most") == 2
    assert all(f"scores {row['score']:.3f}" in shown.out for row in best)
    # The same numbers as `kedge score` gives to the same conversations.
    (tmp_path / "said.jsonl").write_text(
        "".join(
            json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}) + "\n"
            for row in rows
        )
    )
    assert kedge("score", "./judge", "said.jsonl", "--device", "cpu").code == 0
    told = [json.loads(line) for line in (tmp_path / "said.scores.jsonl").read_text().splitlines()]
    assert [one["scores"][0]["score"] for one in told] == pytest.approx([row["score"] for row in rows], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--best-of", "4"), "--best-of N goes with --reward"),
        (("--reward", "./judge"), "--reward goes with --best-of N"),
        (("--best-of", "4", "--reward", "./judge", "-n", "2"), "--answers 2 and --best-of 4: give one of them"),
        (("--best-of", "4", "--reward", "./jugde"), "no model folder at"),
    ],
)
def test_bad_input_is_refused(kedge: Kedge, arguments: tuple[str, ...], message: str) -> None:
    done = kedge("sample", "./model", "-p", "Hi", *SHORT, *arguments)
    assert done.code == 2
    assert message in done.err
