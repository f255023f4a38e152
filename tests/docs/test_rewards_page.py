"""docs/rewards.md: every kind of source has an example there, and every example scores as the page says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from kedge.core.answers import Answer
from kedge.core.errors import PluginError
from kedge.recipe.schema import recipe_schema
from kedge.rewards.build import Mix, text_source
from kedge.rewards.context import RewardContext
from kedge.rewards.settings import TEXT_KINDS, MixSource, RewardSourceSettings

PAGE = Path(__file__).parents[2] / "docs/rewards.md"
EXAMPLES: list[dict[str, Any]] = [
    YAML(typ="safe").load(block)["reward"]
    for block in re.findall(r"```yaml\n(reward:.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
]
RULES = re.findall(r"```python\n(# rules.py\n.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SETTINGS: TypeAdapter[Any] = TypeAdapter(RewardSourceSettings)
RIGHT: dict[str, tuple[Answer, Answer]] = {}
"""By kind, an answer that scores 1 (a judge: 7) under the page's example, and one that scores 0 (2)."""


def row(text: str, solution: str | None = None, **extra: Any) -> Answer:
    return Answer(prompt=(("user", "?"),), text=text, is_finished=True, solution=solution, extra=extra)


NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
CODE = {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}
RIGHT |= {
    "exact": (row("So:\nparis ", "Paris"), row("Paris\nor not", "Paris")),
    "numeric": (row("#### 3.141", "22/7 is no solution: 3.14"), row("#### 3.2", "3.14")),
    "regex": (row("Because!"), row("becauses")),
    "json_schema": (row('```json\n{"a": 1}\n```'), row("```\n{a: 1}\n```")),
    "instructions": (
        row("Tea is a warm drink made of leaves.", **NO_COMMA),
        row("Tea, a drink, is made of leaves.", **NO_COMMA),
    ),
    "unit_tests": (row("```\ndef f(x): return x + 1\n```", **CODE), row("```\ndef f(x): return 0\n```", **CODE)),
    "function": (row("short"), row("long" * 9)),
    "http": (row("good"), row("bad")),
    "judge": (row("good"), row("bad")),
}


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of scores and a judge, as the page describes them."""
    monkeypatch.setenv("REWARD_KEY", "k")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "answers" in body:
                reply: Any = {"scores": [float(row["answer"] == "good") for row in body["answers"]]}
            else:
                text = body["messages"][0]["content"]
                fence = re.findall(r"\[\[\w+\]\]", text)[0]
                grade = 7 if "\ngood\n" in text else 2
                said = f'It says {{"score": 10}}.\n{fence}\n{{"score": {grade}}}'
                reply = {"choices": [{"message": {"content": said}}]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "example", [example for example in EXAMPLES if example["kind"] in RIGHT], ids=lambda example: example["kind"]
)
def test_an_example_scores_as_the_page_says(example: dict[str, Any], url: str, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES[0])
    if "url" in example:
        example = example | {"url": example["url"].replace("http://localhost:8000", url)}
    source = text_source(SETTINGS.validate_python(example), RewardContext(folder=tmp_path, seed=3))
    expected = [7.0, 2.0] if example["kind"] == "judge" else [1.0, 0.0]
    assert source.score(RIGHT[example["kind"]]) == expected


def test_the_mix_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES[0])
    settings = SETTINGS.validate_python(next(example for example in EXAMPLES if example["kind"] == "mix"))
    assert isinstance(settings, MixSource)
    context = RewardContext(folder=tmp_path, seed=3)
    answers = [row("paris", "Paris"), row("The capital of France is\nparis", "Paris"), row("Rome", "Paris")]

    class Scored:
        def __init__(self, part: Any) -> None:
            self.source = text_source(part, context)

        def score(self, rollouts: Any) -> torch.Tensor:
            return torch.tensor(self.source.score(answers))

    rollouts: Any = None
    mix = Mix({name: Scored(part) for name, part in settings.parts.items()}, settings)
    assert mix.score(rollouts).tolist() == [1.25, 1.0, 0.25]


def test_math_and_model_are_described_as_they_are(tmp_path: Path) -> None:
    settings = {example["kind"]: SETTINGS.validate_python(example) for example in EXAMPLES}
    assert (settings["model"].place, settings["model"].objective) == ("reward", "helpful")
    context = RewardContext(folder=tmp_path, seed=3)
    if find_spec("math_verify") is None:
        with pytest.raises(PluginError, match=r"pip install 'kedge\[math\]'"):
            text_source(settings["math"], context)
    else:
        assert text_source(settings["math"], context).score([row(r"\boxed{\frac{1}{2}}", "0.5")]) == [1.0]


def test_every_kind_has_a_section_and_an_example() -> None:
    kinds = {*TEXT_KINDS, "model", "mix"} - {"callable"}
    assert {example["kind"] for example in EXAMPLES} == kinds
    headings = set(re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert kinds <= headings


def test_the_schema_refers_to_pages_that_exist_and_names_no_callable() -> None:
    schema = json.dumps(recipe_schema())
    pages = set(re.findall(r"docs/[\w-]+\.md", schema))
    assert "docs/rewards.md" in pages
    assert [page for page in pages if not (PAGE.parents[1] / page).is_file()] == []
    assert "CallableSource" not in schema
    assert '"callable"' not in schema
