"""`kedge demo`: the whole loop on a small world of our own, or GRPO on a real model; run and told as a story."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import torch

from kedge.commands.command_line import kedge_command
from kedge.commands.narrator import Narrator, Tell
from kedge.data.auditing import audit
from kedge.demo import story
from kedge.demo.recipe import NAMES, Version, write_demo
from kedge.demo.world import FULL_SIZES, Sizes
from kedge.models.loading.aliases import folder_of
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import Recipe, load_recipe
from kedge.recipe.templates import write_template
from kedge.report.writing import REPORT_NAME

REAL = "real-demo"
"""The template of the demo on a real model, and the name of its run."""
REAL_ON_GPU = ("stages.grpo.iterations=40", "stages.grpo.batch=16", "stages.grpo.answers=8")


def run_folder(folder: Path, version: Version | None) -> Path:
    """Where the run of a demo in `folder` lies; None is the real model."""
    return folder / "runs" / (NAMES[version] if version else REAL)


def run_demo(
    folder: Path,
    seed: int,
    *,
    tell: Tell,
    version: Version = "plain",
    sizes: Sizes = FULL_SIZES,
    overrides: Sequence[str] = (),
) -> Path:
    """Write the demo's world into `folder`, run its recipe and tell about it; gives the folder of the run."""
    began, is_let_go = time.monotonic(), version == "overoptimised"
    tell("A shop that replies to its customers", "heading")
    tell(story.WORLD, "plain")
    with _one_thread():
        recipe = load_recipe(write_demo(folder, seed, sizes, version=version), overrides)
        tell(f"Recipe, data and model are in {folder}; what follows is `kedge run {recipe.file}`.", "plain")
        _audit(folder / "data", tell)
        narrator = Narrator(
            recipe=recipe,
            folder=run_folder(folder, version),
            steps={**story.STEPS, **({"ppo": story.WITHOUT_KL} if is_let_go else {})},
            judge="gold",
            tell=tell,
        )
        home = _run(recipe, narrator)
    message = "The kettle of order 107 smells of fish. May I have a refund?"
    price = _again(recipe, f"stages.ppo.kl.start={0.5 if is_let_go else 0.2}")
    other = _doctor(home) if is_let_go else f"{kedge_command()} demo --overoptimise"
    _end(home, [_sample(home, message), price, other], tell)
    tell(f"All of it took {_duration(time.monotonic() - began)} on one thread, with seed {seed}.", "plain")
    return home


def run_real(folder: Path, seed: int, *, tell: Tell, reward: str | None = None, overrides: Sequence[str] = ()) -> Path:
    """The same with SmolLM2-135M; `reward` is a reward model's folder in the place of the rules."""
    began = time.monotonic()
    tell("A real model learns to follow instructions", "heading")
    tell(story.REAL_WORLD if reward is None else f"SmolLM2-135M is improved by GRPO against {reward}.", "plain")
    folder_of("smollm2-135m")  # says how to get the weights where they are missing, before anything is written
    file, *_ = write_template(REAL, folder)
    own = [f"seed={seed}", *(REAL_ON_GPU if torch.cuda.is_available() else ())]
    if reward is not None:
        own += [f"stages.{stage}.reward={Path(reward).resolve()}" for stage in ("grpo", "eval")]
    recipe = load_recipe(file, [*own, *overrides])
    tell(f"Recipe and questions are in {folder}; what follows is `kedge run {file}`.", "plain")
    if not torch.cuda.is_available():
        tell("On a CPU with two cores it takes about five minutes.", "plain")
    narrator = Narrator(
        recipe=recipe, folder=run_folder(folder, None), steps=story.REAL_STEPS, judge="reward", tell=tell, policy="grpo"
    )
    home = _run(recipe, narrator)
    question = "How do I get red wine out of a carpet? Leave out all commas."
    _end(
        home,
        [_sample(home, question, "grpo"), _again(recipe, "stages.grpo.iterations=40"), _doctor(home, "grpo")],
        tell,
    )
    tell(f"All of it took {_duration(time.monotonic() - began)}, with seed {seed}.", "plain")
    return home


def _run(recipe: Recipe, narrator: Narrator) -> Path:
    home = run_recipe(recipe, narrator.folder.parent, is_resumed=False, say=narrator.hear)
    narrator.end()
    return home


@contextmanager
def _one_thread() -> Generator[None]:
    """On matrices this small a second thread costs more than it does, and the sums come out the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _audit(data: Path, tell: Tell) -> None:
    train = [str(data / f"{name}.jsonl") for name in ("demonstrations", "pairs", "prompts")]
    report = audit(train, heldout=[str(data / "heldout-prompts.jsonl")])
    bad = [finding.message for finding in report.findings if finding.level in ("warning", "fatal")]
    items = sum(file.items for file in report.files)
    tell(story.audited(items, len(report.files), len(report.findings), len(bad)), "plain")
    for message in bad:
        tell(message, "warning")


def _end(home: Path, commands: Sequence[str], tell: Tell) -> None:
    tell("Where to go from here", "heading")
    tell(f"The report, with curves, samples and events: {home / REPORT_NAME}", "plain")
    for command in commands:
        tell(command, "sample")


def _sample(home: Path, prompt: str, stage: str = "ppo") -> str:
    return f'{kedge_command()} sample {quote(str(home / stage))} -p "{prompt}"'


def _doctor(home: Path, stage: str = "ppo") -> str:
    return f"{kedge_command()} doctor {quote(str(home / stage))}"


def _again(recipe: Recipe, change: str) -> str:
    return f"{kedge_command()} run {quote(str(recipe.file))} --set name=mine --set {change}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(170.4), _duration(9.2)
    ('2 min 50 s', '9 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
