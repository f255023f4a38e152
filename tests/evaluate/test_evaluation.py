"""Every number of an evaluation against the same number worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from kedge.core.errors import DataError
from kedge.evaluate.answers import ModelAnswer, preferences
from kedge.evaluate.evaluation import evaluate, table_lines

Make = Callable[..., ModelAnswer]
NAN = math.nan


@pytest.fixture
def answers(scored: Make) -> list[ModelAnswer]:
    return [
        scored("sft", 0, 1.0, tokens=(1, 2, 1, 2, 1, 2, 1)),
        scored("sft", 1, 2.0, tokens=(1, 2), is_finished=False),
        scored("sft", 2, 5.0, tokens=(3,)),
        scored("sft", 3, NAN, tokens=(4, 5)),
        scored("ppo", 0, 3.0, tokens=(1, 2, 3), kl=2.0),
        scored("ppo", 1, 2.0, tokens=(1, 2), kl=-1.0),
        scored("ppo", 2, 4.0, tokens=(9, 8, 7, 6), kl=4.0),
        scored("ppo", 3, 7.0, tokens=(4, 5, 6), kl=1.0),
    ]


def test_each_model_by_itself(answers: list[ModelAnswer]) -> None:
    found = evaluate(answers, tie=0.0, seed=1)
    sft, ppo = found.models["sft"], found.models["ppo"]
    assert (found.baseline, found.prompts) == ("sft", 4)
    assert sft.scores["reward"].mean is not None
    assert (sft.scores["reward"].mean.mean, sft.scores["reward"].unscored) == (pytest.approx(8 / 3), 1)
    assert ppo.scores["reward"].mean is not None
    assert (ppo.scores["reward"].mean.mean, ppo.scores["reward"].mean.prompts) == (pytest.approx(4.0), 4)
    assert sft.length is not None
    assert sft.length.mean == pytest.approx((7 + 2 + 1 + 2) / 4)
    assert (sft.finished, ppo.finished) == (0.75, 1.0)
    # 1212, 2121, 1212, 2121: two of the four 4-grams of the first answer were there before.
    assert sft.repetition == pytest.approx(0.5 / 4)
    # 12 21 12 21 12 21 | 12 | 3 | 45: four different ones among nine.
    assert sft.distinct == pytest.approx(4 / 9)
    assert ppo.kl is not None
    assert ppo.kl.mean == pytest.approx(1.5)
    assert sft.kl is None


def test_two_models_are_compared_where_both_have_a_score(answers: list[ModelAnswer]) -> None:
    found = evaluate(answers, tie=0.0, seed=1).comparisons["ppo"]["reward"]
    # Prompt 0 is won, 1 is tied, 2 is lost, 3 has no score of sft.
    assert (found.win_rate.wins, found.win_rate.ties, found.win_rate.losses) == pytest.approx((1 / 3,) * 3)
    assert (found.win_rate.rate, found.win_rate.prompts, found.left_out) == (pytest.approx(0.5), 3, 1)
    assert found.gain.mean == pytest.approx((2 + 0 - 1) / 3)
    assert found.length_controlled is not None
    wide = evaluate(answers, tie=1.0, seed=1).comparisons["ppo"]["reward"].win_rate
    assert (wide.wins, wide.ties, wide.losses) == pytest.approx((1 / 3, 2 / 3, 0.0))


def test_a_preference_for_length_is_taken_out(scored: Make) -> None:
    """The longer answer wins in 4 of 5 prompts whoever wrote it, and ppo writes the longer one in 30 of 40.

    The odds are 4 : 1 where ppo is longer and 1 : 4 where it is shorter: θ is the mean of the two log-odds, 0.
    """
    longer = [i < 30 for i in range(40)]
    won = [(i % 5 > 0) == is_longer for i, is_longer in enumerate(longer)]
    answers = [scored("sft", i, 0.0, tokens=(1,) * 10) for i in range(40)]
    answers += [scored("ppo", i, 1.0 if won[i] else -1.0, tokens=(1,) * (14 if longer[i] else 6)) for i in range(40)]
    found = evaluate(answers, tie=0.0, seed=1).comparisons["ppo"]["reward"]
    assert found.win_rate.rate == pytest.approx((24 + 2) / 40)
    assert found.length_controlled is not None
    assert found.length_controlled.mean == pytest.approx(
        0.5, abs=0.02
    )  # as far as the prior pulls  # the prior of φ pulls a little


def test_at_equal_length_too_a_prompt_counts_once(scored: Make) -> None:
    """Equal lengths, so the rate stays: 20 prompts with 3 answers each are lost, 60 with one are won; 60 of 80."""
    lost = [scored("b", i, 0.0, number=n) for i in range(20) for n in range(3)]
    answers = [scored("a", i, 1.0) for i in range(80)] + lost + [scored("b", i, 2.0) for i in range(20, 80)]
    found = evaluate(answers, tie=0.0, seed=0).comparisons["b"]["reward"]
    assert found.length_controlled is not None
    assert found.length_controlled.mean == pytest.approx(0.75, rel=1e-3)


def test_several_answers_to_a_prompt_are_one_observation(scored: Make) -> None:
    answers = [scored("a", 0, x, number=n) for n, x in enumerate((1.0, 3.0))] + [scored("a", 1, 0.0)]
    answers += [scored("b", 0, x, number=n) for n, x in enumerate((2.0, 4.0))] + [scored("b", 1, 9.0)]
    found = evaluate(answers, tie=0.0, seed=0)
    # On prompt 0, b wins 2>1, 4>1, 4>3 and loses 2<3; on prompt 1 it wins.
    assert found.comparisons["b"]["reward"].win_rate.rate == pytest.approx((0.75 + 1.0) / 2)
    mean = found.models["a"].scores["reward"].mean
    assert mean is not None
    assert mean.mean == pytest.approx((2.0 + 0.0) / 2)


def test_models_must_have_answered_the_same_prompts(scored: Make) -> None:
    with pytest.raises(DataError, match="b and a have answered different prompts"):
        evaluate([scored("a", 0, 1.0), scored("b", 1, 1.0)], tie=0.0, seed=0)


def test_all_of_it_is_json_and_a_source_without_scores_says_nothing(scored: Make) -> None:
    found = evaluate([scored("a", 0, NAN), scored("b", 0, NAN)], tie=0.0, seed=0)
    kept = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert kept["models"]["a"]["scores"] == {"reward": {"mean": None, "unscored": 1}}
    assert kept["comparisons"] == {"b": {}}
    assert "–" in "\n".join(table_lines(found))


def test_the_table_has_a_column_a_model(answers: list[ModelAnswer]) -> None:
    table = table_lines(evaluate(answers, tie=0.0, seed=1))
    assert table[0].split() == ["sft", "ppo"]
    by_title = {line.partition("  ")[0]: line for line in table}
    assert by_title["reward, mean"].split()[2] == "2.667"
    assert "50.0% [" in by_title["reward, win rate over sft"]
    assert by_title["reward, ties"].split()[-1] == "33.3%"
    assert by_title["finished"].split() == ["finished", "75.0%", "100.0%"]
    assert by_title["KL, nats"].split()[2:4] == ["–", "1.50"]


def test_the_best_and_the_worst_answer_become_a_pair(scored: Make) -> None:
    answers = [
        scored("a", 0, 1.0, text="bad"),
        scored("a", 0, 2.0, text="fair", number=1),
        scored("b", 0, 3.0, text="good"),
        scored("a", 1, 5.0, text="same words"),  # tied by score
        scored("b", 1, 5.05, text="other words"),
        scored("a", 2, 1.0, text="same  words"),  # tied by words
        scored("b", 2, 9.0, text="same words"),
        scored("a", 3, NAN),  # nothing to compare with
        scored("b", 3, 1.0),
        scored("a", 4, 1.0, text=" \n"),  # says nothing
        scored("b", 4, 2.0, text="something"),
    ]
    found = preferences(answers, "reward", tie=0.1)
    assert [(better.text, worse.text) for better, worse in found.pairs] == [("good", "bad")]
    assert (found.ties, found.unpaired) == (2, 2)
    assert preferences(answers, "gold", tie=0.1).unpaired == 5


def test_a_rate_at_equal_length_needs_lengths_that_differ_in_more_than_one_way(scored: Make) -> None:
    """Longer by 4 everywhere says nothing; longer by 4 here and there does, and so does the same length."""
    for gaps, is_told in ((lambda i: 4, False), (lambda i: 4 * (i % 2), True), (lambda i: 0, True)):
        answers = [scored("sft", i, 0.0, tokens=(1,) * 10) for i in range(12)]
        answers += [scored("ppo", i, 1.0 if i % 3 else -1.0, tokens=(1,) * (10 + gaps(i))) for i in range(12)]
        found = evaluate(answers, tie=0.0, seed=1).comparisons["ppo"]["reward"]
        assert (found.length_controlled is not None) == is_told
