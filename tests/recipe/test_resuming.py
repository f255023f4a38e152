"""What a resumed run may change and what it may not: settings, code, templates, installed parts, versions, threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core import plugins
from kedge.core.errors import ConfigError, DataError
from kedge.core.files import hash_folder
from kedge.models.loading.tiny import make_tiny
from kedge.recipe import pipeline
from kedge.recipe.inputs import local_modules
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import Recipe, load_recipe
from kedge.runs.folder import Run, status_of
from kedge.runs.manifest import read_manifest

Write = Callable[[str, str], Path]

RECIPE = """\
kedge: 1
name: code
model: ./tiny
chat_template: chat.jinja
stages:
  first: {kind: group, reward: {kind: function, path: "rules.py:plain"}, prompts: prompts.jsonl, iterations: 2}
  second:
    kind: group
    from: first
    prompts: prompts.jsonl
    reward: {kind: mix, parts: {a: {kind: function, path: "rules.py:plain"}}}
    gold: {kind: function, path: "gold/truth.py:true"}
"""
FILES = {
    "rules.py": "import helper\nfrom gold import words\n\ndef plain(answer):\n    return helper.size(answer)\n",
    "helper.py": "def size(answer):\n    return len(answer.text)\n",
    "other.py": "unused = 1\n",
    "gold/__init__.py": "",
    "gold/words.py": "GOOD = ('yes',)\n",
    "gold/truth.py": "from . import words\n\ndef true(answer):\n    return 1.0\n",
    "chat.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "prompts.jsonl": '{"prompt": "Hello"}\n',
}


class Stages:
    """The stages of the recipe, which do nothing; those named in `failing` fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failing: set[str] = set()
        self.ran: list[str] = []
        self.said: list[str] = []

    def recipe(self, *sets: str) -> Recipe:
        recipe = load_recipe(self.folder / "a.yaml", sets)
        kinds = {name: replace(stage, run=self._run) for name, stage in recipe.kinds.items()}
        return replace(recipe, kinds=kinds)

    def run(self, *sets: str, is_resumed: bool = False) -> Path:
        self.said.clear()
        return run_recipe(self.recipe(*sets), self.folder / "runs", is_resumed=is_resumed, say=self.said.append)

    def fail(self, *names: str) -> None:
        """A run in which these stages fail, and the next time they do not."""
        self.failing = set(names)
        with pytest.raises(DataError, match="no good"):
            self.run()
        self.failing, self.ran = set(), []

    def _run(self, context: Any, _: Any) -> Mapping[str, Path]:
        self.ran.append(context.name)
        context.event("info", "stage.data", "one prompt")
        if context.name in self.failing:
            raise DataError("no good")
        return {"model": make_tiny(context.folder / "model", hidden=32, layers=1)}


@pytest.fixture
def stages(tmp_path: Path, write: Write) -> Stages:
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)
    for name, text in FILES.items():
        write(name, text)
    write("a.yaml", RECIPE)
    return Stages(tmp_path)


def events(folder: Path, code: str) -> list[dict[str, Any]]:
    return [event for event in Run.open(folder, for_writing=False).read_events() if event["code"] == code]


def test_every_input_is_in_the_manifest(stages: Stages) -> None:
    folder = stages.run()
    inputs = [(one.name, one.kind, Path(one.path).name) for one in read_manifest(folder / "second").inputs]
    assert inputs == [
        ("from", "model", "model"),
        ("prompts", "prompts", "prompts.jsonl"),
        ("chat_template", "template", "chat.jinja"),
        ("reward.parts.a.path", "code", "rules.py"),
        ("reward.parts.a.path imports gold/__init__.py", "code", "__init__.py"),
        ("reward.parts.a.path imports gold/words.py", "code", "words.py"),
        ("reward.parts.a.path imports helper.py", "code", "helper.py"),
        ("gold.path", "code", "truth.py"),
        ("gold.path imports words.py", "code", "words.py"),
    ]
    assert read_manifest(folder / "second").environment.threads == torch.get_num_threads()


def test_a_changed_input_of_any_kind_is_refused_by_name(stages: Stages) -> None:
    stages.fail("second")
    for file, text in FILES.items():
        if file == "other.py":
            continue
        (stages.folder / file).write_text(text + "\n \n")
        named = rf"have changed since it was started:\n(.*\n)*  .*{Path(file).name}.*content"
        with pytest.raises(ConfigError, match=named):
            stages.run(is_resumed=True)
        (stages.folder / file).write_text(text)
    assert "second" not in stages.ran


def test_what_is_no_input_may_change(stages: Stages) -> None:
    stages.fail("second")
    (stages.folder / "other.py").write_text("unused = 2\n")
    (stages.folder / "runs/code/first/model/README.md").write_text("license: mit\n")
    stages.run(is_resumed=True)
    assert stages.ran == ["second"]


def test_another_version_of_an_installed_part_is_refused(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        name, version = "kedge-words", "1.0"

    point = EntryPoint(name="words", group="kedge.rewards", value="json:loads")._for(Package())  # pyright: ignore
    installed = {**plugins._installed("rewards"), "words": point}  # pyright: ignore[reportPrivateUsage]
    own = plugins._installed  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(plugins, "_installed", lambda kind: installed if kind == "rewards" else own(kind))
    with_plugin = "stages.second.reward.parts.a.path=words"
    stages.failing = {"second"}
    with pytest.raises(DataError):
        stages.run(with_plugin)
    inputs = read_manifest(stages.folder / "runs/code/second").inputs
    assert [(one.name, one.path) for one in inputs if one.kind == "plugin"] == [("rewards.words", "kedge-words 1.0")]
    Package.version = "1.1"
    with pytest.raises(ConfigError, match=r"rewards\.words \(plugin\): was kedge-words 1\.0, is kedge-words 1\.1"):
        stages.run(with_plugin, is_resumed=True)
    Package.version = "1.0"
    stages.failing = set()
    stages.run(with_plugin, is_resumed=True)


def test_local_modules_follow_imports_of_imports(write: Write) -> None:
    write("a.py", "import json, b\n\ndef f():\n    from c.d import e\n")
    write("b.py", "import a\n")
    write("c/d.py", "import f.g\n")
    write("f.py", "")
    write("json_like.py", "")
    folder = write("z.py", "not python (").parent
    modules = [path.relative_to(folder).as_posix() for path in local_modules(folder / "a.py")]
    assert modules == ["b.py", "c/d.py", "f.py"]
    assert local_modules(folder / "z.py") == []


def test_what_has_not_begun_may_change_and_is_an_event(stages: Stages) -> None:
    stages.fail("first")
    sets = ("stages.second.batch=7", "stages.second.answers=3")
    folder = stages.run(*sets, is_resumed=True)
    (event,) = events(folder, "settings.changed")
    assert [(one["stage"], one["key"], one["after"]) for one in event["evidence"]["changes"]] == [
        ("second", "batch", 7),
        ("second", "answers", 3),
    ]
    assert any(line.startswith("changed: stages.second.batch: was ") for line in stages.said)
    assert read_manifest(folder / "second").settings["batch"] == 7
    assert read_manifest(folder).settings == stages.recipe(*sets).resolved()
    stages.run(*sets, is_resumed=True)
    assert len(events(folder, "settings.changed")) == 1


def test_what_a_stage_has_used_may_not_change_and_is_listed(stages: Stages) -> None:
    stages.fail("second")
    changes = ("stages.first.batch=7", "stages.second.batch=9", "seed=4", "stages.second.kl.limit=99")
    with pytest.raises(ConfigError) as caught:
        stages.run(*changes, is_resumed=True)
    message = str(caught.value)
    assert "seed: was 0, is 4 (first is done, second is failed)" in message
    assert "stages.first.batch: was " in message and ", is 7 (first is done)" in message  # noqa: PT018
    assert ", is 9 (second is failed)" in message
    assert "limit" not in message  # it may change
    assert "What only stages that have not begun use may change" in message
    assert caught.value.exit_code == 2
    folder = stages.run("stages.second.kl.limit=99", is_resumed=True)
    assert read_manifest(folder / "second").settings["kl"]["limit"] == 99
    assert len(events(folder, "settings.changed")) == 1


def test_stages_that_have_not_begun_may_come_and_go_but_others_stay(stages: Stages, write: Write) -> None:
    stages.fail("first")
    write("a.yaml", RECIPE.partition("  second:")[0])
    folder = stages.run(is_resumed=True)
    assert status_of(folder) == "done"
    write("a.yaml", RECIPE.replace("  first:", "  third:").replace("from: first", "from: third"))
    with pytest.raises(ConfigError, match=r"stages\.first: is not in the recipe any more \(first is done\)"):
        stages.run(is_resumed=True)


def test_the_model_may_change_where_no_stage_that_has_begun_starts_from_it(stages: Stages, write: Write) -> None:
    make_tiny(stages.folder / "another", hidden=32, layers=2)
    write("a.yaml", RECIPE.replace("kind: group, reward", "kind: group, from: ./tiny, reward"))
    stages.fail("first")
    stages.run("model=./another", is_resumed=True)
    write("a.yaml", RECIPE)
    with pytest.raises(ConfigError, match="first is done"):
        stages.run(is_resumed=True)


def test_other_versions_and_threads_are_events_and_lines(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    stages.fail("second")
    now = pipeline.environment

    def later(**about: Any) -> Any:
        here = now(**about)
        return replace(here, packages={**here.packages, "torch": "9.9"})

    monkeypatch.setattr(pipeline, "environment", later)
    monkeypatch.setattr(pipeline, "_num_threads", lambda: 64)
    folder = stages.run(is_resumed=True)
    version = now(device="").packages["torch"]
    for home in (folder, folder / "second"):
        (event,) = events(home, "versions.changed")
        assert event["evidence"]["versions"] == {"torch": {"before": version, "after": "9.9"}}
    assert any(f"torch {version} → 9.9" in line for line in stages.said)
    (event,) = events(folder / "second", "threads.changed")
    assert (event["evidence"]["before"], event["evidence"]["after"]) == (torch.get_num_threads(), 64)
    assert read_manifest(folder / "second").environment.threads == 64
    stages.run(is_resumed=True)
    assert len(events(folder, "versions.changed")) == 1


def test_events_of_a_stage_that_starts_over_are_not_doubled(stages: Stages) -> None:
    stages.fail("second")
    folder = stages.run(is_resumed=True)
    codes = [event["code"] for event in Run.open(folder / "second", for_writing=False).read_events()]
    assert codes == ["run.failed", "run.resumed", "stage.data", "run.memory"]


def test_a_run_of_an_older_version_is_compared_with_what_it_recorded(stages: Stages) -> None:
    stages.fail("second")
    file = stages.folder / "runs/code/second/run.json"
    manifest = json.loads(file.read_text())
    manifest["inputs"] = [one for one in manifest["inputs"] if one["kind"] not in ("code", "template")]
    del manifest["environment"]["threads"]
    (model,) = (one for one in manifest["inputs"] if one["kind"] == "model")
    model["hash"] = hash_folder(stages.folder / "runs/code/first/model")  # with the card
    del manifest["settings"]["batch"]  # a setting that came later, and has its default
    file.write_text(json.dumps(manifest))
    folder = stages.run(is_resumed=True)
    assert "rules.py" in file.read_text()  # from now on it is watched
    assert status_of(folder) == "done"
