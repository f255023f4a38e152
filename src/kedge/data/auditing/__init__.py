"""`kedge data check`: what is wrong with data files before anything is trained on them."""

from __future__ import annotations

from kedge.data.auditing.result import Audit, FileAudit, Offender
from kedge.data.auditing.run import audit
from kedge.data.auditing.terminal import render_terminal

__all__ = ["Audit", "FileAudit", "Offender", "audit", "render_terminal"]
