"""How good a reward model is, on pairs it was not trained on: numbers, findings in words, one page to open."""

from __future__ import annotations

from kedge.report.reward.html import render_html
from kedge.report.reward.records import Combine, ScoredPair
from kedge.report.reward.result import RewardReport
from kedge.report.reward.run import reward_report
from kedge.report.reward.terminal import render_terminal

__all__ = ["Combine", "RewardReport", "ScoredPair", "render_html", "render_terminal", "reward_report"]
