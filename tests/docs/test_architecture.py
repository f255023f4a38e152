"""docs/architecture.md leads a reader along files that are there, and that really run in the order of its legs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kedge
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.stages.rl.run import RLRun

ROOT = Path(__file__).parents[2]
SOURCE = Path(kedge.__file__).parent
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs/pictures/architecture.svg").read_text(encoding="utf-8")
LOOP = "stages/ppo/train.py"
"""Runs around all iterations, in one call."""
PAIRS = [
    {"prompt": f"Say {word} {number}", "chosen": f"{word}.", "rejected": "I will not say that."}
    for number in range(8)
    for word in ("yes", "no", "maybe")
]
STAGES: dict[str, Any] = {
    "reward": {"kind": "reward", "data": "pairs.jsonl", "batch": 8, "max_length": 96, "if_unfit": "go_on"},
    "ppo": {
        "kind": "ppo",
        "reward": "reward",
        "prompts": "prompts.jsonl",
        "roles": "separate",
        "iterations": 2,
        "batch": 4,
        "epochs": 1,
        "minibatches": 2,
        "sampling": {"max_new_tokens": 6},
        "checkpoints": {"every": 1},
    },
}


def section(title: str) -> str:
    """The text below the heading that begins with `title`."""
    (text,) = re.findall(rf"^## {re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return text


def leg(number: int) -> list[str]:
    """The files of a leg, in its order."""
    return re.findall(r"^\| `([^`]+)` \|", section(f"{number}. "), re.MULTILINE)


@pytest.fixture(scope="module")
def files_that_ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Files of the package in which a function ran: in a whole recipe of a reward model and PPO with its report, and
    from the end of PPO's first iteration to the end of its second."""
    home = tmp_path_factory.mktemp("legs")
    rows = {"pairs": PAIRS, "prompts": [{"prompt": pair["prompt"]} for pair in PAIRS]}
    for name, items in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    recipe = {"kedge": 1, "name": "legs", "model": "tiny", "device": "cpu", "stages": STAGES}
    (home / "legs.yaml").write_text(json.dumps(recipe))

    whole, iteration = set[str](), set[str]()
    current = whole
    finish = RLRun.finish

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and file.startswith(str(SOURCE)):
            current.add(str(Path(file).relative_to(SOURCE)))

    def finish_and_switch(run: RLRun, number: int, *arguments: Any) -> None:
        nonlocal current
        finish(run, number, *arguments)
        current = iteration if number == 0 else whole

    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RLRun, "finish", finish_and_switch)
        sys.setprofile(note)
        try:
            run_recipe(load_recipe(home / "legs.yaml"), home / "runs", is_resumed=False, say=lambda line: None)
        finally:
            sys.setprofile(before)
    return whole | iteration, iteration


def test_every_path_of_the_page_exists() -> None:
    paths = re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)
    assert len(paths) > 80
    assert [path for path in paths if not is_there(path)] == []


def is_there(path: str) -> bool:
    """A bare name such as `train.py` stands for any file of that name."""
    is_bare = "/" not in path.rstrip("/")
    return (SOURCE / path).exists() or (ROOT / path).exists() or (is_bare and any(SOURCE.rglob(path.rstrip("/"))))


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_every_file_of_a_leg_runs(number: int, files_that_ran: tuple[set[str], set[str]]) -> None:
    whole, _ = files_that_ran
    files = leg(number)
    assert len(files) >= 7
    assert [file for file in files if file not in whole and not is_record(file)] == []
    assert len(set(files)) == len(files)


def is_record(file: str) -> bool:
    """Records and protocols are passed as data; no function of theirs need run."""
    return file == "data/examples.py"


def test_the_legs_of_an_iteration_name_every_file_that_runs_in_it(files_that_ran: tuple[set[str], set[str]]) -> None:
    _, iteration = files_that_ran
    assert sorted([*leg(3), *leg(4)]) == sorted(iteration | {LOOP})


def test_the_page_and_the_test_of_an_iteration_agree_on_its_limit() -> None:
    (limit,) = re.findall(r"its limit is (\d+) files", PAGE)
    counting = (ROOT / "tests/stages/ppo/test_files_of_an_iteration.py").read_text(encoding="utf-8")
    assert f"MOST_FILES = {limit}\n" in counting


def test_every_folder_of_the_source_has_its_line() -> None:
    listed = re.findall(r"^ {4}([\w/]+)/ {2,}\S", section("The folders"), re.MULTILINE)
    packages = [str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("__init__.py") if file.parent != SOURCE]
    assert sorted(listed) == sorted(packages)


def test_the_limits_are_those_of_the_tests() -> None:
    house = (ROOT / "tests/architecture/test_house.py").read_text(encoding="utf-8")
    modules, lines, kernel = re.findall(r"^(?:MOST_MODULES|MOST_LINES|LONGEST_FUNCTION) = (\d+)$", house, re.MULTILINE)
    assert f"**At most {modules} modules a folder, {lines} lines a file**" in PAGE
    assert f"({kernel} a kernel)" in PAGE


def test_the_picture_has_a_box_for_each_room_of_the_legs() -> None:
    boxes = re.findall(r'<text class="(?:name|room)" [^>]*>(\w+)</text>', PICTURE)
    rooms = {file.partition("/")[0] for number in range(1, 6) for file in leg(number)}
    assert sorted(rooms - {"stages", "runtime"} - set(boxes)) == []
    assert [room for room in boxes if not (SOURCE / room).is_dir()] == []
