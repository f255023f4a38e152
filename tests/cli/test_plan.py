"""`kedge plan` as a user runs it: what it prints, its JSON, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kedge = Callable[..., Any]
RECIPE = """\
kedge: 1
name: one
model: tiny
stages:
  sft: {kind: sft, data: demos.jsonl, batch: 4}
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "demos.jsonl").write_text(8 * f"{json.dumps(row)}\n")
    (tmp_path / "one.yaml").write_text(RECIPE)


def test_a_plan_tells_roles_ways_time_and_money(kedge: Kedge) -> None:
    done = kedge("plan", "one.yaml", "--gpu", "a100-80g", "--price", "2")
    assert (done.code, done.err) == (0, "")
    for words in ("one.yaml on a100-80g of 79.1 GiB, $2 an hour each", "optimiser", "full *", "lora, base_bits 4"):
        assert words in done.out
    assert "a100-80g was not measured" in done.out
    assert done.out.rstrip().endswith("fits")


def test_json_has_the_whole_tree(kedge: Kedge) -> None:
    values = json.loads(kedge("plan", "one.yaml", "--gpu", "h200", "--json").out)
    (stage,) = values["stages"]
    assert values["machine"]["name"] == "h200"
    assert stage["memory"]["roles"][0]["role"] == "model"
    assert {"diff", "probed", "simulated", "total"} <= values.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one.yaml", "--gpu", "h20"], "did you mean 'h200'"),
        (["one.yaml", "--gpu", "h200", "--gpus", "0"], "expected 1 or more"),
        (["one.yaml", "--gpu", "h200", "--price", "-3"], "expected US dollars"),
        (["one.yaml", "--gpu", "h200", "--probe"], "leave one out"),
        (["absent.yaml"], "absent.yaml"),
    ],
)
def test_bad_input_is_refused_with_words(kedge: Kedge, arguments: list[str], words: str) -> None:
    done = kedge("plan", *arguments)
    assert done.code == 2
    assert words in " ".join(done.err.split())
