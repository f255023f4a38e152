"""How good a reward model is, on pairs it was not trained on: numbers, findings in words, one page to open."""

from __future__ import annotations

from kedge.report.reward.numbers import render_terminal
from kedge.report.reward.page import render_html
from kedge.report.reward.result import RewardReport
from kedge.report.reward.scored_pairs import Combine, ScoredPair
from kedge.report.reward.verdict import reward_report

__all__ = ["Combine", "RewardReport", "ScoredPair", "render_html", "render_terminal", "reward_report"]
