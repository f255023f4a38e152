"""Stage `short_prompts`: keep the prompts that have few words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kedge.core.settings import Section
from kedge.core.stage import Input, Stage
from kedge.stages.shared.context import Context


class ShortPromptsSettings(Section):
    kind: Literal["short_prompts"]
    data: Annotated[str, Input("prompts")]
    """Prompts to choose from: a file, or another stage."""
    max_words: int = Field(default=50, ge=1)
    """Longer prompts are left out."""


def explain(settings: ShortPromptsSettings) -> list[str]:
    return [f"prompts of at most {settings.max_words} words are kept"]


def run(context: Context, settings: ShortPromptsSettings) -> Mapping[str, Path]:
    rows = Path(context.input("data")).read_text(encoding="utf-8").splitlines()
    short = [row for row in rows if len(json.loads(row)["prompt"].split()) <= settings.max_words]
    file = context.folder / "short.jsonl"
    file.write_text("".join(f"{row}\n" for row in short), encoding="utf-8")
    context.event("info", "short_prompts.kept", f"{len(short)} of {len(rows)} prompts are kept")
    return {"prompts": file}


STAGE = Stage(
    summary="Keep the prompts that have few words.",
    settings=ShortPromptsSettings,
    makes={"prompts": "prompts"},
    explain=explain,
    run=run,
)
