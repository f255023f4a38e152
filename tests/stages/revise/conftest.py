"""A tiny model, prompts that say what becomes of them, and a critic behind OpenAI's API that does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.stages.revise.run import run
from kedge.stages.revise.settings import ReviseSettings
from kedge.testing.stub_judge import StubJudge

WAYS = ("polite", "unchanged", "empty", "evasive", "worse", "polite")
"""What the critic does to the answer to each prompt; `worse` is what the judge thinks of it."""
REFUSAL = "Sorry, but I can't assist with that."
CONSTITUTION = {
    "principles": [
        {"id": "rude", "critique": "Is it rude?", "revision": "Make it polite.", "choice": "Which is polite?"},
        {"id": "plain", "critique": "Is it long?", "revision": "Make it short.", "choice": "Which is short?",
         "axis": "helpful", "weight": 2},
    ]
}  # fmt: skip


def shown(request: str, name: str) -> str:
    """What stands in the fence of that name."""
    (mark,) = set(re.findall(r"\[\[[0-9a-f]{32}\]\]", request))
    return request.partition(f"{mark} {name}\n")[2].partition(f"\n{mark} end of the {name}")[0]


class StubCritic(StubJudge):
    """Criticises and revises by the way that the prompt names, and judges `worse` where it says so."""

    def reply_to(self, request: dict[str, Any], digest: str) -> dict[str, Any]:
        text: str = request["messages"][-1]["content"]
        if "answer A" in text:
            return super().reply_to(request, digest)
        prompt, answer, critique = (shown(text, name) for name in ("conversation", "answer", "critique"))
        way = prompt.split()[-1]
        said = "Well." if not critique else f"{text.split('the mark ')[1].split()[0]}\n{self.revision(way, answer)}"
        choice = {"message": {"role": "assistant", "content": said}}
        return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}

    def revision(self, way: str, answer: str) -> str:
        match way:
            case "unchanged":
                return answer
            case "empty":
                return ""
            case "evasive":
                return REFUSAL
            case _:
                return f"Please. {'' if answer.startswith('Please') else answer}"


def prefers_revisions(prompt: str, a: str, b: str) -> float:
    sign = -1.0 if prompt.endswith("worse") else 1.0
    return sign * (a.startswith("Please") - b.startswith("Please"))


@pytest.fixture(scope="session")
def revise_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("revise")
    for name, window in (("tiny", 2048), ("narrow", 200)):
        config = make_tiny(home / name, hidden=32, layers=1) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": window}))
    rows = [{"prompt": f"Case {number} {way}", "harmless": number != 9} for number, way in enumerate(WAYS * 2)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "constitution.yaml").write_text(json.dumps(CONSTITUTION))
    return home


@pytest.fixture
def critic() -> Iterator[StubCritic]:
    with StubCritic(truth=prefers_revisions) as server:
        yield server


@pytest.fixture
def start(revise_home: Path, run_recorded: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """One stage `revise`; returns its folder."""

    def start(*, place: str = "stage", **changes: Any) -> Path:
        given: dict[str, Any] = {"kind": "revise", "from": "tiny", "prompts": "p", "constitution": "c", "times": 2}
        settings = ReviseSettings.model_validate(given | {"max_new_tokens": 6, "dtype": "float32"} | changes)
        files = {"from": settings.base or "", "prompts": "prompts.jsonl", "constitution": "constitution.yaml"}
        sources = {field: str(revise_home / name) for field, name in files.items()}
        run_recorded(tmp_path / place, run, settings, **sources)
        return tmp_path / place

    return start


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
