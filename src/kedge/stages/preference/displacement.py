"""A warning of likelihood displacement: chosen answers that become unlikely themselves.

A preference loss only asks that the rejected answer becomes less likely than the chosen one. Both may fall, and what
rises then is neither (Razin et al. 2024).
"""

from __future__ import annotations

from typing import Final

from kedge.stages.shared.context import Context

CODE: Final = "preference.displacement"
ALLOWED_FALL: Final = 0.1
"""How far the log-prob of held-out chosen answers may fall, as a share of where it began, before it is a warning."""


def warn_of_displacement(context: Context, chosen_logp: float, *, step: int) -> None:
    """Warn, once in a run, when held-out chosen answers are less likely than at step 0 by more than is allowed."""
    lines = (line for line in context.run.read_metrics() if line["step"] == 0)
    start = next(line["heldout/chosen_logp"] for line in lines if line.get("heldout/chosen_logp") is not None)
    is_reported = any(event["code"] == CODE for event in context.run.read_events())
    if is_reported or chosen_logp >= start - ALLOWED_FALL * abs(start):
        return
    message = (
        f"held-out chosen answers have become less likely: from {start:.1f} to {chosen_logp:.1f} nats an answer. "
        "Probability goes to answers that are in no pair; a higher sft_weight or beta or a lower rate holds it back"
    )
    context.event("warning", CODE, message, step=step, start=start, now=chosen_logp, allowed_fall=ALLOWED_FALL)
