"""A PPO run that is still being written, and a pipeline whose stages come one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS

MakeRun = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Generator[MakeRun]:
    """Begin a run below the temporary folder; whoever is still writing at the end is closed."""
    with ExitStack() as open_runs:

        def make(place: str, kind: str = "ppo") -> Run:
            stages = {"sft": {}, "ppo": {}}
            settings = {"stages": stages, "model": "tiny"} if kind == "pipeline" else {**PPO_SETTINGS, "kind": kind}
            stage = "" if kind == "pipeline" else place.rpartition("/")[2]
            manifest = new_manifest(name=place.split("/")[0], stage=stage, kind=kind, seed=3, settings=settings)
            return open_runs.enter_context(Run.create(tmp_path / place, manifest=manifest))

        yield make
