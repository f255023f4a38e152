"""The statistics of people's labels: agreement, reliability, care, and which pairs to ask next.

Everything here is pure: labels in, numbers out. Nothing opens a database or a model, nor a file but those whose form is
defined here (a constitution, a trust report).
"""

from kedge.feedback.agreement import (
    AgreementInterval,
    agreement_interval,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    majority,
    raw_agreement,
    unanimous,
)  # fmt: skip
from kedge.feedback.crowd_bt import CrowdBT, crowd_bt
from kedge.feedback.people import (
    Drift,
    GoldCheck,
    Share,
    SideRun,
    drift,
    gold_check,
    longest_side_run,
    position_bias,
    run_probability,
    self_agreement,
    tie_share,
    words_a_minute,
)  # fmt: skip
from kedge.feedback.rankings import kendall_tau_b, strict_pair_agreement
from kedge.feedback.ratings import Ratings
from kedge.feedback.reliability import DawidSkene, dawid_skene
from kedge.feedback.steps import margin_of

__all__ = [
    "AgreementInterval", "CrowdBT", "DawidSkene", "Drift", "GoldCheck", "Ratings", "Share", "SideRun",
    "agreement_interval", "cohen_kappa", "crowd_bt", "dawid_skene", "drift", "fleiss_kappa", "gold_check",
    "kendall_tau_b", "krippendorff_alpha", "longest_side_run", "majority", "margin_of", "position_bias",
    "raw_agreement", "run_probability", "self_agreement", "strict_pair_agreement", "tie_share", "unanimous",
    "words_a_minute",
]  # fmt: skip
