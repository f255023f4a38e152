"""The true preference, on replies written by hand: every term, the order of qualities, and any text whatever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.errors import DataError
from kedge.demo import phrases
from kedge.demo.truth import facts_of, read_reply, true_preference

MESSAGE = "My order 107 came, but the kettle was missing. I would like a refund, please."
FACT = "For the kettle of order 107 you get a refund."


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", -1.0),  # not finished
        (FACT, 3.0),
        ("We booked a refund for order 107.", 2.0),  # no item
        ("We booked a voucher for order 107.", 0.0),  # 1 - 1
        ("For the piano of order 119 you get a repair.", -3.0),
        ("For the kettle of order 1071 you get a refund.", 1.0),  # another number, though it begins alike
        (f"{FACT} We booked a voucher.", 1.0),  # the right remedy and a wrong one: wrong
        (f"{FACT} We are very sorry.", 4.0),
        (f"{FACT} We are very sorry. Thank you for writing.", 4.5),
        (f"{FACT} We are very sorry. Thank you for writing. You are most welcome!", 3.5),
        (f"{FACT} We are very sorry. We are very sorry.", 3.5),  # 3 + 1.5 - 1
        (f"{FACT} Yours, the shop.", 3.5),
        (f"Yours, the shop. {FACT}", 3.0),  # a closing in front closes nothing
        (f"{FACT} Do not write again.", 1.0),
        (f"{FACT} Your message is important to us.", 2.25),
        (f"{FACT} The moon is made of cheese.", 2.5),
        ("For the kettle of order 107 you get a refund", 1.5),  # cut off: unfinished, and no sentence of ours
        (f"We are very sorry. {FACT} Thank you for writing. Yours, the shop.", 5.0),
        (f"we  are very SORRY. {FACT.upper()}", 4.0),  # neither case nor spacing matters
    ],
)
def test_each_term_of_the_rule(reply: str, expected: float) -> None:
    assert true_preference(MESSAGE, reply) == expected


def test_words_beyond_32_cost_a_tenth_each() -> None:
    padding = " ".join(phrases.PADDINGS[:3])  # 8 + 6 + 7 words
    reply = f"{FACT} {padding} {phrases.PADDINGS[3]}"  # 10 + 21 + 6 = 37
    assert len(reply.split()) == 37
    assert true_preference(MESSAGE, reply) == pytest.approx(3 - 4 * 0.75 - 0.5)


def test_qualities_stand_in_the_order_in_which_people_would_put_them(message: str) -> None:
    statement = "We checked order 107 and booked a refund for the kettle."
    ordered = [
        f"We are very sorry. {statement} Thank you for your patience. Kind regards, your shop.",
        f"We are very sorry. {statement}",
        statement,
        f"As a valued customer, you know our values. {statement}",
        "We booked a refund.",
        "We got your message.",
        "",
        "We checked order 119 and booked a voucher for the piano.",
        "We checked order 119 and booked a voucher for the piano. Nobody else complains.",
        "Next time read the manual. " * 6,
    ]
    scores = [true_preference(message, reply) for reply in ordered]
    assert scores == sorted(set(scores), reverse=True)


def test_flattery_without_end_is_worse_than_curtness(message: str) -> None:
    statement = "For the kettle of order 107 you get a refund."
    fawning = f"{statement} {' '.join(phrases.COURTESIES)}"
    assert true_preference(message, fawning) < 0 < true_preference(message, statement)


def test_the_facts_of_every_kind_of_message_are_found() -> None:
    facts = {"order": "119", "item": "umbrella", "remedy": "voucher"}
    for problem in phrases.PROBLEMS:
        for request in phrases.REQUESTS:
            assert facts_of(f"Hi there. {problem} It was a birthday present. {request}".format_map(facts)) == facts


def test_every_sentence_of_the_shop_is_known_and_none_of_two_kinds(message: str) -> None:
    facts = {"order": "119", "item": "umbrella", "remedy": "voucher"}
    kinds = {
        "fact": [sentence.format_map(facts) for group in phrases.FACTS.values() for sentence in group],
        "courtesy": phrases.COURTESIES,
        "rudeness": phrases.RUDENESSES,
        "padding": phrases.PADDINGS,
        "closing": phrases.CLOSINGS,
    }
    for kind, sentences in kinds.items():
        for sentence in sentences:
            assert read_reply(message, sentence).counts == {kind: 1}, sentence


def test_a_message_of_another_world_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(DataError, match=r"names no order and no remedy: 'My kettle\?'"):
        true_preference("My kettle?", FACT)


WORDS = st.sampled_from([*phrases.all_sentences(), *phrases.ITEMS, *phrases.ORDERS, "order", ".", "!", "\n", "{", "�"])


@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode(errors="replace")), st.lists(WORDS).map(" ".join)))
def test_any_text_has_a_score_that_follows_from_it_alone(reply: str) -> None:
    score = true_preference(MESSAGE, reply)
    assert score == true_preference(MESSAGE, reply)
    # At most: three facts, two courtesies and a closing. At least: each word is a sentence that makes no sense and
    # repeats one, or a sentence of rudeness; then come length, wrong facts and the missing end.
    assert -4 - 3.5 * (len(reply) + 1) <= score <= 5
