"""The rule by which the pairs of this folder were labelled, for watching and evaluating, never for training; and a
person who labels by it, with noise."""

from hashlib import blake2b
from math import log

from kedge import Answer
from kedge.testing.toy import true_score


def truth(answer: Answer) -> float:
    """2 for the asked fact, 1 for the article's name, 1 for a courtesy; less for wrong facts, rudeness and padding."""
    return true_score(answer.prompt[-1][1], answer.text)


def person(answer: Answer) -> float:
    """The truth and the mood of a person: of two answers, the one with more of this is preferred.

    With Gumbel noise people prefer as Bradley and Terry say, P(first) = sigmoid(difference of truth / 0.5). The noise
    belongs to the answer: the same answer is liked as much whenever it is asked about.
    """
    digest = blake2b(repr((answer.prompt, answer.text)).encode(), digest_size=6).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**48
    return truth(answer) - 0.5 * log(-log(share))
