"""Diversity by numbers that can be worked out on paper."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kedge.exams import diversity
from kedge.exams.diversity import bleu, same_opening, self_bleu, words_of
from kedge.exams.exam import OpenReply


def test_bleu_by_hand() -> None:
    # words 4/5, pairs (3+1)/(4+1), triples (2+1)/(3+1), fours (1+1)/(2+1); the reference is a word longer: exp(1 - 6/5)
    answer, reference = words_of("the cat sat on mats"), words_of("the cat sat on the mat")
    expected = math.exp(1 - 6 / 5) * (4 / 5 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert bleu(answer, [reference]) == pytest.approx(expected, rel=1e-12)


def test_a_gram_counts_as_often_as_one_reference_has_it() -> None:
    assert bleu(["a", "a", "a"], [["a"], ["a"]], longest=1) == pytest.approx(1 / 3)
    assert bleu(["x"], [["a"]]) == 0.0


def test_equal_and_unlike_answers_are_the_ends() -> None:
    assert self_bleu([words_of("all the same words here")] * 4) == pytest.approx(1.0)
    assert self_bleu([["a", "b"], ["c", "d"]]) == 0.0
    assert same_opening([list("abcde"), list("abcdx"), list("xbcde")]) == pytest.approx(2 / 3)
    assert self_bleu([[], []]) == 1.0  # empty answers are as collapsed as can be


def test_the_exam_scores_each_prompt_by_all_of_its_answers() -> None:
    dialogue = diversity.exam(Path(diversity.__file__).parent / "shipped" / "diversity").take(0)
    questions = next(dialogue)
    assert len(questions) == 30
    assert {getattr(question, "answers", 0) for question in questions} == {8}
    texts = ("one two three",) * 4 + tuple(f"{word} begins otherwise" for word in "abcd")
    with pytest.raises(StopIteration) as end:
        dialogue.send([OpenReply(texts=texts, is_finished=(True,) * 8) for _ in questions])
    scores = {score.metric: score.score for score in end.value.value if score.item == questions[0].item}
    assert scores["same_opening"] == 0.5
    assert scores["distinct_1"] == 9 / 24
    assert scores["distinct_2"] == 7 / 16
