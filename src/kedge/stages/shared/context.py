"""What a running stage sees of the pipeline: its run folder, its inputs as paths, its seed, a way to speak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.core.world import ALONE, World, once
from kedge.stages.shared.interrupt import StopRequest

if TYPE_CHECKING:
    from kedge.core.findings import Level
    from kedge.core.protocols import Tracker
    from kedge.runs.folder import Run

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """`sources` maps an input field to the files or models it stands for, stages resolved to what they made."""

    name: str
    seed: int
    split_seed: int = 0
    """Of what is split by prompt: the seed of round 1 in every round, so that a prompt stays on its side."""
    run: Run
    tracker: Tracker
    device: str
    chat_template: str | None
    recipe_folder: Path
    """Where the paths of code that a recipe names start."""
    round: int = 0
    """Which round of the recipe this is; 0 where it has none."""
    sources: Mapping[str, Sequence[str]]
    say: Say
    stop: StopRequest = field(default_factory=StopRequest)
    """Asked to stop, a loop saves and ends after the step that is under way."""
    world: World = ALONE
    """The processes that run this stage together."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    def once(self, action: Callable[[], T]) -> T:
        """What is done in the stage's folder: by process 0, while the others wait for what it gives."""
        return once(self.world, action)

    def set_aside(self, name: str) -> Path | None:
        """A file of the stage's folder for rows that cannot be used; for one process alone to write."""
        return None if self.world.rank else self.folder / name

    def inputs(self, field: str) -> Sequence[str]:
        return self.sources.get(field, ())

    def input(self, field: str) -> str:
        """The one source of a field that must be there."""
        (source,) = self.sources[field]
        return source

    def event(self, level: Level, code: str, message: str, **evidence: Any) -> None:
        """Write an event into the run and say it on the screen."""
        step = evidence.pop("step", None)
        self.tracker.event({"level": level, "code": code, "message": message, "step": step, "evidence": evidence})
        self.say(f"  {message}")
