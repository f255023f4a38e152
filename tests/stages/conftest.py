"""A place to write recipes in, short PPO runs on a tiny model, and single stages whose learners are recorded."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stages.judge_server import Handler, JudgeServer, longer

from kedge.cli.main import main
from kedge.data.template import template_hash
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import lora_members
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.settings import LoraSettings
from kedge.models.training.learner import Learner
from kedge.models.training.passes import CPU_TOKENS, Cut, PassSize
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs import Run, new_manifest
from kedge.runs.checkpoints import CheckpointSettings
from kedge.runs.folder import RunTracker
from kedge.stages.shared.context import Context

RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8
"""
LEARN = {"lr": 1e-2, "schedule": "constant", "warmup": 0.0, "eps": 1e-5}
SHORT: dict[str, Any] = {
    "kind": "ppo",
    "reward": {"kind": "function", "path": "rules.py:plain"},
    "roles": "separate",
    "memory": {"dtype": "float32", "lora": {"rank": 2}},
    "iterations": 2,
    "batch": 4,
    "epochs": 1,
    "minibatches": 2,
    "micro_batch": 4,
    "max_prompt_tokens": 40,
    "sampling": {"max_new_tokens": 8},
    "actor": LEARN,
    "critic": LEARN,
    "logging": {"every": 1, "samples": 1},
    "checkpoints": {"every": 1, "keep": 20},
}


@pytest.fixture(scope="session")
def ppo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, ten prompts, conversations to imitate, and a reward model: plain, and as an adapter."""
    home = tmp_path_factory.mktemp("ppo")
    tiny = make_tiny(home / "tiny", hidden=32, layers=2)
    prompts = [{"prompt": f"Say {'abcdefghij'[number] * (number % 3 + 1)}"} for number in range(10)]
    demonstrations = [
        {"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": f"{word} it is."}]}
        for word in ("yes", "no", "maybe", "never", "often")
    ]
    for name, rows in {"prompts": prompts, "demonstrations": demonstrations}.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(_knowing(build(tiny, seed=3, dtype="float32")), home / "judge")
    (adapted,) = lora_members(build(tiny, seed=4, dtype="float32"), LoraSettings(rank=2), count=1, seed=7)
    with torch.no_grad():  # as after some training: a new adapter changes nothing
        for name, one in adapted.model.named_parameters():
            if "lora_B." in name:
                one.copy_(0.03 * torch.sin(torch.arange(one.numel()) + 2.0).view_as(one))
    save(_knowing(adapted), home / "judge-lora")
    return home


def _knowing(reward: RewardModel) -> RewardModel:
    facts = replace(reward.facts, template_hash=template_hash(reward.tokenizer), max_length=192)
    return replace(reward, facts=facts)


@pytest.fixture(scope="session")
def run_ppo(ppo_home: Path) -> Callable[..., Path]:
    """A run of one PPO stage below a folder; settings go over those of `SHORT`. Returns the folder of the stage."""

    def run(place: Path, *, resumed: bool = False, rules: str = RULES, **settings: Any) -> Path:
        file = write_ppo(place, ppo_home, rules, settings)
        return run_recipe(load_recipe(file), place / "runs", is_resumed=resumed, say=print) / "ppo"

    return run


@pytest.fixture(scope="session")
def ppo_recipe(ppo_home: Path) -> Callable[..., Path]:
    """The recipe of such a run, not started."""

    def recipe(place: Path, *, rules: str = RULES, **settings: Any) -> Path:
        return write_ppo(place, ppo_home, rules, settings)

    return recipe


def write_ppo(place: Path, home: Path, rules: str, settings: Mapping[str, Any]) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "rules.py").write_text(rules)
    stage = merged(SHORT, {"prompts": str(home / "prompts.jsonl"), **settings})
    recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(home / "tiny"), "device": "cpu"}
    file = place / "recipe.yaml"
    file.write_text(json.dumps({**recipe, "stages": {"ppo": stage}}))
    return file


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; a source of scores is replaced as a whole."""
    found = dict(under)
    for key, value in over.items():
        is_section = isinstance(value, Mapping) and isinstance(found.get(key), Mapping) and "kind" not in value
        found[key] = merged(found[key], value) if is_section else value
    return found


@pytest.fixture(scope="session")
def records() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of a journal without what a clock gave them."""

    def read(journal: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        return [{name: value for name, value in one.items() if not _is_timed(name)} for one in found]

    return read


def _is_timed(name: str) -> bool:
    return name in ("at", "tokens/per_second") or name.startswith("time/")


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, torch.Tensor]]:
    """The weights of the model that a stage made."""
    from safetensors.torch import load_file

    return lambda stage: load_file(stage / "model" / "model.safetensors")


@dataclass(kw_only=True)
class Recorded:
    """Where a stage wrote; for each optimiser step its learner, its batches and the seed of torch's random numbers; and
    the batches of each held-out evaluation."""

    folder: Path
    learners: list[Learner[Any]] = field(default_factory=list[Learner[Any]])
    updates: list[list[Any]] = field(default_factory=list[list[Any]])
    seeds: list[int] = field(default_factory=list[int])
    evaluations: list[list[Any]] = field(default_factory=list[list[Any]])

    def texts(self, batches: Sequence[Any]) -> list[bytes]:
        """The printable part of every row, in order; the tiny model's tokens are bytes."""
        rows = [row.tolist() for batch in batches for row in batch.tokens_BT]
        return [bytes(token for token in row if token < 128) for row in rows]

    def lines(self, journal: str) -> list[dict[str, Any]]:
        file = self.folder / f"{journal}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def metric(self, name: str) -> dict[int, float]:
        """By step, where it was logged."""
        return {line["step"]: line[name] for line in self.lines("metrics") if name in line}

    def checkpoints(self) -> list[int]:
        return Run.open(self.folder, for_writing=False).checkpoints.steps()


@pytest.fixture(scope="session")
def run_recorded() -> Callable[..., Recorded]:
    """One stage without a recipe around it, in a folder that is new or taken up again, with seed 3.

    With `interrupt_at`, Ctrl-C comes in that optimiser step, counted from 1.
    """

    def run(
        folder: Path,
        train: Callable[[Context, Any], Any],
        settings: Any,
        *,
        interrupt_at: int = 0,
        **sources: str | Sequence[str],
    ) -> Recorded:
        recorded, keep = Recorded(folder=folder), CheckpointSettings(keep=99)
        update, measure = Learner[Any].update, Learner[Any].measure

        def recording_update(learner: Learner[Any], batches: Cut[Any]) -> dict[str, float]:
            recorded.learners.append(learner)
            recorded.updates.append(list(batches(learner.train_step.passes.size or PassSize(tokens=CPU_TOKENS))))
            recorded.seeds.append(torch.initial_seed())
            if len(recorded.updates) == interrupt_at:
                signal.raise_signal(signal.SIGINT)
            return update(learner, batches)

        def recording_measure(learner: Learner[Any], batches: Cut[Any]) -> dict[str, float]:
            recorded.evaluations.append(list(batches(learner.train_step.inference.size)))
            return measure(learner, batches)

        if folder.exists():
            opened = Run.open(folder, for_writing=True, keep=keep)
        else:
            manifest = new_manifest(name="a", kind=settings.kind, seed=3, settings={})
            opened = Run.create(folder, manifest=manifest, keep=keep)
        with opened as stage_run, pytest.MonkeyPatch.context() as patched:
            patched.setattr(Learner, "update", recording_update)
            patched.setattr(Learner, "measure", recording_measure)
            patched.setenv("KEDGE_CACHE", str(folder / "cache"))
            context = Context(
                name="stage",
                seed=3,
                run=stage_run,
                tracker=RunTracker(stage_run),
                device="cpu",
                chat_template=None,
                recipe_folder=folder.parent,
                sources={name: [paths] if isinstance(paths, str) else paths for name, paths in sources.items()},
                say=lambda _: None,
            )
            train(context, settings)
        return recorded

    return run


@pytest.fixture
def kedge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process; returns its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kedge", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return run


@pytest.fixture
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer(("127.0.0.1", 0), Handler)
    server.verdict = longer
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
