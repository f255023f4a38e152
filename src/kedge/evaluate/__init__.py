"""Answers of several models to the same prompts, as numbers: scores, win rates, rankings, and what they decide.

Everything here is pure: records in, records out. The stage samples and scores the answers.
"""

from kedge.evaluate.detectors import Detector, corrected_share
from kedge.evaluate.length_control import length_controlled
from kedge.evaluate.paired import holm, mcnemar, non_inferiority, rogan_gladen, superiority, tango
from kedge.evaluate.ranking import bradley_terry, rank_intervals

__all__ = [
    "Detector", "bradley_terry", "corrected_share", "holm", "length_controlled", "mcnemar", "non_inferiority",
    "rank_intervals", "rogan_gladen", "superiority", "tango",
]  # fmt: skip
