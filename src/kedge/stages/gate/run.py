"""The stage: what a recipe says, as a request; the table on the screen; the end of the run where the verdict is bad."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.gate.table import table_lines
from kedge.gate.verdict import NAME
from kedge.stages.gate.gating import GateRequest, NamedModel, gate, refuse
from kedge.stages.gate.replay import Replay
from kedge.stages.gate.settings import GateSettings
from kedge.stages.shared.context import Context


def run(context: Context, settings: GateSettings) -> Mapping[str, Path]:
    candidate, baseline = context.input("candidate"), context.input("baseline")
    request = GateRequest(
        candidate=NamedModel(place=candidate, names=(settings.candidate, candidate)),
        baseline=NamedModel(place=baseline, names=(settings.baseline, baseline)),
        sources=[Path(source) for source in context.inputs("from")],
        rules=Path(context.input("rules")),
        badcases=context.recipe_folder / settings.badcases,
        ledger=context.recipe_folder / settings.ledger,
        is_reserved=settings.reserved,
        replay=Replay(
            model=candidate,
            files=None,
            folder=context.recipe_folder,
            seed=context.seed,
            device=context.device,
            dtype=settings.dtype,
            rows=settings.rows,
            chat_template=context.chat_template,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            world=context.world,
            say=context.say,
        ),
    )
    file = context.folder / NAME
    verdict, notes = gate(request, file)
    for line in table_lines(verdict):
        context.say(f"  {line}")
    for note in notes:
        context.event("warning", "gate.looks", note)
    level = "info" if verdict.verdict == "pass" else "warning"
    context.event(level, "gate.verdict", f"verdict: {verdict.verdict} ({file})", verdict=verdict.verdict)
    refuse(verdict, undecided=settings.undecided, file=file)
    return {"verdict": file}
