"""`kedge run --resume-if-begun`: what schedulers start again goes on, and never overrules a contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.commands.run import has_begun
from kedge.core.errors import ContractStop
from kedge.runs.folder import Run
from kedge.runs.manifest import Status, new_manifest


def make_run(folder: Path, status: Status) -> None:
    manifest = new_manifest(name="pair", kind="pipeline", seed=0, settings={})
    with Run.create(folder, manifest=manifest) as run:
        run.finish(status)


def test_without_a_run_it_begins(tmp_path: Path) -> None:
    assert not has_begun(tmp_path / "pair")


@pytest.mark.parametrize("status", ["interrupted", "failed", "waiting", "done"])
def test_a_run_that_is_there_is_gone_on_with(tmp_path: Path, status: Status) -> None:
    make_run(tmp_path / "pair", status)
    assert has_begun(tmp_path / "pair")


def test_a_run_that_a_contract_stopped_stays_stopped(tmp_path: Path) -> None:
    make_run(tmp_path / "pair", "stopped")
    with pytest.raises(ContractStop, match="nothing starts it again but --resume"):
        has_begun(tmp_path / "pair")
    assert ContractStop.exit_code == 3
