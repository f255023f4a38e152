"""What `kedge plan` does: the plan of a recipe, the changed recipe, and what a probe on this machine corrects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.commands.plan.probe import Probed, probe_recipe
from kedge.core.errors import ConfigError
from kedge.core.files import refuse_overwriting, write_text
from kedge.core.yaml.editing import with_value
from kedge.plan.diff import changed_text, diff_lines
from kedge.plan.machines import find_machine
from kedge.plan.plan import Plan, plan_works, works_of
from kedge.plan.simulate import Simulated, simulate
from kedge.recipe.layers import override_of
from kedge.recipe.schema import load_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked on the command line."""

    recipe: Path
    overrides: Sequence[str] = ()
    gpu: str | None = None
    gpus: int = 1
    price: float | None = None
    label_price: float | None = None
    probe: bool = False
    simulate: bool = False
    write: Path | None = None
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan, with what was asked besides it."""

    file: Path
    plan: Plan
    diff: tuple[str, ...]
    simulated: tuple[Simulated, ...] = ()
    probed: tuple[Probed, ...] = ()
    written: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            **self.plan.as_dict(),
            "diff": list(self.diff),
            "simulated": [asdict(row) for row in self.simulated],
            "probed": [asdict(row) for row in self.probed],
            "written": None if self.written is None else str(self.written),
        }


def plan(asked: Asked, say: Callable[[str], None] = lambda text: None) -> Answer:
    """Plan a recipe. `say` is told of what takes long."""
    machine = find_machine(asked.gpu, gpus=asked.gpus, price=asked.price, label_price=asked.label_price)
    recipe = load_recipe(asked.recipe, list(asked.overrides))
    if asked.probe and asked.gpu is not None:
        raise ConfigError("--probe measures on this machine, and --gpu names another: leave one out")
    if asked.write is not None:
        _refuse_other_folders(asked.write, asked.recipe)
        refuse_overwriting([asked.write], inputs=[asked.recipe], force=asked.force)
    works = works_of(recipe, machine)
    probed = probe_recipe(asked.recipe, asked.overrides, recipe, works, machine, say) if asked.probe else []
    found = plan_works(recipe, works, machine, {row.stage: row.correction for row in probed})
    text = asked.recipe.read_text(encoding="utf-8")
    for override in asked.overrides:
        text = with_value(text, *override_of(override))
    diff = diff_lines(text, found.changes, asked.recipe.name) if found.changes else []
    if asked.write is not None:
        write_text(asked.write, changed_text(text, found.changes) if found.changes else text)
    return Answer(
        file=asked.recipe,
        plan=found,
        diff=tuple(diff),
        simulated=tuple(row for work in works for row in simulate(work, machine)) if asked.simulate else (),
        probed=tuple(probed),
        written=asked.write,
    )


def _refuse_other_folders(target: Path, recipe: Path) -> None:
    if target.resolve().parent != recipe.resolve().parent:
        raise ConfigError(
            f"--write {target}: files that {recipe.name} names are looked for from its own folder; write it beside it, "
            f"{recipe.parent / target.name}"
        )
