"""`kedge compare`: the table on the screen, a page, and JSON; folders that are no runs are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill

Kedge = Callable[..., Any]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        manifest = new_manifest(name=name, stage="ppo", kind="ppo", seed=seed, settings=dict(PPO_SETTINGS))
        with Run.create(tmp_path / "runs" / name, manifest=manifest) as run:
            fill(run, 20, seed=seed)
            run.finish("done")


def test_a_row_a_run_and_a_page(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("compare", "runs/one", "runs/two", "--out", "pages/both.html")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["run", "one/ppo", "two/ppo"]
    assert lines[-1] == "wrote pages/both.html"
    assert "<title>one/ppo, two/ppo · Kedge</title>" in (tmp_path / "pages/both.html").read_text()


def test_numbers_for_machines(kedge: Kedge) -> None:
    found = json.loads(kedge("compare", "runs/one", "--json").out)
    (row,) = found["runs"]
    last = found["curves"]["ppo"]["reward"]["training"][-1]
    assert row["numbers"]["kl"]["source"] == "training"
    assert row["numbers"]["kl"]["value"] == pytest.approx(last[0], abs=0.5)
    assert "wins" in row["why_not"]


def test_what_is_no_run_is_refused(kedge: Kedge) -> None:
    done = kedge("compare", "runs/one", "runs/tow")
    assert done.code == 2
    assert "runs/tow: there is no such folder (did you mean 'two'?)" in done.err
