"""`kedge demo`: what Kedge does, on this machine, with nothing but this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kedge.cli.run import live_view
from kedge.cli.screen import out, tell, writing
from kedge.core.errors import ConfigError

_LOOKS = {"heading": ("\n[bold]", "[/]", ""), "plain": ("", "", "  "), "sample": ("[dim]", "[/]", "    ")}
_WARNING = ("[yellow]", "[/]", "  ! ")


def demo(
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same demo.")] = 1,
    is_all: Annotated[bool, typer.Option("--all", help="Compare with DPO and best-of-N too.")] = False,
    overoptimise: Annotated[
        bool, typer.Option("--overoptimise", help="Let go of the anchor: the reward rises, the truth falls.")
    ] = False,
    real: Annotated[bool, typer.Option("--real", help="GRPO on SmolLM2-135M; about five minutes on a CPU.")] = False,
    reward: Annotated[
        str | None, typer.Option("--reward", help="With --real: a reward model instead of rules.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where to put it all.")] = Path("runs/demo"),
) -> None:
    """The whole loop in about two minutes: data, SFT, reward model, PPO, evaluation, report."""
    from kedge.commands.demo import run_demo, run_folder, run_real
    from kedge.recipe.templates import free_folder

    if is_all + overoptimise + real > 1:
        raise ConfigError("--all, --overoptimise and --real are different demos: give one of them")
    if reward is not None and not real:
        raise ConfigError("--reward goes with --real: the small demo trains a reward model of its own")
    console = out()
    folder = free_folder(folder)
    version = None if real else "all" if is_all else "overoptimised" if overoptimise else "plain"

    def say(text: str, tone: str) -> None:
        before, after, indent = _LOOKS.get(tone, _WARNING)
        tell(console, f"{before}{escape(text)}{after}", indent=indent)

    with writing(folder), live_view(console, run_folder(folder, version)):
        if version is None:
            run_real(folder, seed, tell=say, reward=reward)
        else:
            run_demo(folder, seed, tell=say, version=version)
