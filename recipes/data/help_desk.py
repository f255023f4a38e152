"""The rule by which the pairs of this folder were labelled: for watching and evaluating, never for training."""

from kedge import Answer
from kedge.testing.toy import true_score


def truth(answer: Answer) -> float:
    """2 for the asked fact, 1 for the article's name, 1 for a courtesy; less for wrong facts, rudeness and padding."""
    return true_score(answer.prompt[-1][1], answer.text)
