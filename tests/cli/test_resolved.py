"""`kedge check --resolved`, and what a screen makes of text that others wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from kedge.cli.screen import out, print_json

Kedge = Callable[..., Any]

BASE = "kedge: 1\nname: a\nmodel: tiny\n"
RECIPE = """\
extends: base.yaml
stages:
  ppo:
    kind: ppo
    reward: {kind: exact}
    prompts: p.jsonl
    actor: {clip: 0.5}
  group: {kind: group, method: dapo, reward: {kind: exact}, prompts: p.jsonl}
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "a.yaml").write_text(RECIPE)


def lines_of(kedge: Kedge, *arguments: str) -> list[str]:
    done = kedge("check", "a.yaml", "--resolved", *arguments)
    assert (done.code, done.err) == (0, "")
    return done.out.splitlines()


def test_every_setting_has_a_line_with_its_origin(kedge: Kedge) -> None:
    lines = lines_of(kedge, "--set", "stages.ppo.kl={limit: 3}", "--set", "seed=5")
    assert {
        "name = \"a\"  # file: base.yaml line 2",
        "seed = 5  # --set",
        "device = \"auto\"  # built-in",
        "stages.ppo.kind = \"ppo\"  # file: a.yaml line 4",
        "stages.ppo.reward.kind = \"exact\"  # file: a.yaml line 5",
        "stages.ppo.reward.ignore_case = true  # built-in",
        "stages.ppo.actor.clip = 0.5  # file: a.yaml line 7",
        "stages.ppo.actor.lr = 1e-06  # stage",
        "stages.ppo.actor.schedule = \"constant\"  # stage",
        "stages.ppo.actor.beta1 = 0.9  # built-in",
        "stages.ppo.kl.limit = 3.0  # --set",
        "stages.ppo.kl.start = 0.05  # built-in",
        "stages.ppo.checkpoints.every = 10  # stage",
        "stages.group.method.kind = \"dapo\"  # file: a.yaml line 8",
        "stages.group.method.clip = 0.2  # built-in",
        "stages.group.kl.start = 0.0  # stage",
        "stages.group.minibatches = 4  # stage",
        "stages.group.epochs = 1  # built-in",
    } <= set(lines)  # fmt: skip
    paths = [line.partition(" = ")[0] for line in lines]
    assert len(set(paths)) == len(paths) > 150


def test_what_is_printed_is_the_same_recipe(kedge: Kedge) -> None:
    sets = [part for line in lines_of(kedge) for part in ("--set", line.partition("  #")[0].replace(" = ", "=", 1))]
    values = [line.partition("  #")[0] for line in lines_of(kedge, *sets)]
    assert values == [line.partition("  #")[0] for line in lines_of(kedge)]


def test_json_has_the_same_with_file_and_line(kedge: Kedge) -> None:
    (recipe,) = json.loads("\n".join(lines_of(kedge, "--json")))
    by_path = {setting["path"]: setting for setting in recipe["settings"]}
    clip, rate = by_path["stages.ppo.actor.clip"], by_path["stages.ppo.actor.lr"]
    assert (clip["value"], clip["from"], clip["line"]) == (0.5, "file", 7)
    assert (rate["value"], rate["from"], rate["file"]) == (1e-6, "stage", None)


def test_an_empty_mapping_empties_a_section_and_a_map(kedge: Kedge) -> None:
    lines = lines_of(kedge, "--set", "stages.ppo.actor={}")
    assert "stages.ppo.actor.clip = 1.0  # built-in" in lines
    assert "stages.ppo.actor.lr = 1e-06  # stage" in lines
    full = ("--set", "trackers.tensorboard={folder: x}", "--set", "stages.ppo.reward={kind: function, path: a.py:f}")
    options = ("--set", "stages.ppo.reward.options={unit: km}")
    lines = lines_of(kedge, *full, *options)
    assert "stages.ppo.reward.options.unit = \"km\"  # --set" in lines  # fmt: skip
    emptied = lines_of(kedge, *full, *options, "--set", "trackers={}", "--set", "stages.ppo.reward.options={}")
    assert {"trackers = {}  # --set", "stages.ppo.reward.options = {}  # --set"} <= set(emptied)


def test_a_key_of_a_file_steers_no_terminal(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(BASE + '"se\\e[2Jed\\u202e[red]:smile:": 1\n')
    for arguments in (("check", "evil.yaml"), ("check", "evil.yaml", "--resolved"), ("run", "evil.yaml")):
        done = kedge(*arguments)
        assert done.code == 2
        assert "line 4: se\\x1b[2Jed\\u202e[red]:smile:: not a setting here" in done.err


def test_a_screen_shows_what_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("x\x1b[1m")
    table.add_row(Text("\u202ecell :smile:\x07"))
    out().print("told :smile: \x1b]0;title\x07", markup=False, soft_wrap=True)
    out().print("[bold]markup[/] :smile: \u2066", soft_wrap=True)
    out().print(table)
    print_json({"name": "\u202e"})
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(shown)
    assert "told :smile: \\x1b]0;title" in shown
    assert "markup :smile: \\u2066" in shown
    assert '"\\u202e"' in shown
