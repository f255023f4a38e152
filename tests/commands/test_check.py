"""What `kedge check` knows of a recipe's files: what is fatal, and what a stage takes care of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.commands.check import RecipeReport, check_recipe, refuse_unfit
from kedge.core.errors import ConfigError
from kedge.recipe.schema import load_recipe
from kedge.rewards import isolation

Write = Callable[[str, str], Path]

HEAD = "kedge: 1\nname: a\nmodel: tiny\nstages:\n"
WORDS = ("apples", "boats", "clouds", "drums", "eagles", "forks", "gates", "hills")


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def pairs(count: int, year: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"What do you know about {WORDS[i % 8]} in the year {year + 37 * i}?",
            "chosen": f"Something {i}" + " and more" * (i % 2),
            "rejected": f"Nothing {i}" + " at all" * ((i + 1) % 2),
        }
        for i in range(count)
    ]


def checked(write: Write, stages: str) -> RecipeReport:
    return check_recipe(load_recipe(write("a.yaml", HEAD + stages)))


def levels(report: RecipeReport) -> dict[str, str]:
    return {finding.code: finding.level for finding in report.findings if finding.code != "duplicates.near_prompts"}


@pytest.fixture
def files(write: Write) -> None:
    good = pairs(60, 1000)
    write("good.jsonl", lines(good))
    write("same.jsonl", lines([*good, *({"prompt": f"q{i}", "chosen": "x", "rejected": "x"} for i in range(3))]))
    write("held.jsonl", lines([{"prompt": row["prompt"]} for row in good[:4]]))
    write("cut.jsonl", lines(good[:30]) + '{"prompt": "cut\n' + lines(good[30:]))


@pytest.mark.usefixtures("files")
def test_identical_pairs_are_fatal_where_nobody_removes_them(write: Write) -> None:
    assert levels(checked(write, "  rm: {kind: reward, data: same.jsonl}\n"))["pairs.identical"] == "fatal"


@pytest.mark.usefixtures("files")
def test_what_a_data_stage_drops_is_told_and_not_fatal(write: Write) -> None:
    report = checked(write, "  prep: {kind: data, files: [same.jsonl]}\n  rm: {kind: reward, data: prep}\n")
    (found,) = [finding for finding in report.findings if finding.code == "pairs.identical"]
    assert found.level == "info"
    assert found.message == "3 of 63 pairs (4.76 %) have the same text on both sides. The `data` stage leaves them out."
    assert report.is_fit


@pytest.mark.usefixtures("files")
def test_what_a_data_stage_is_told_to_keep_stays_fatal(write: Write) -> None:
    report = checked(write, "  prep: {kind: data, files: [same.jsonl], drop: [empty]}\n")
    assert levels(report)["pairs.identical"] == "fatal"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("order", [1, -1])
def test_a_file_that_is_also_used_as_it_is_stays_fatal(write: Write, order: int) -> None:
    stages = ["  prep: {kind: data, files: [same.jsonl]}\n", "  rm: {kind: reward, data: same.jsonl}\n"]
    assert levels(checked(write, "".join(stages[::order])))["pairs.identical"] == "fatal"


@pytest.mark.usefixtures("files")
def test_faults_of_a_held_out_file_are_not_the_data_stages_to_mend(write: Write) -> None:
    write("judged.jsonl", lines([*pairs(20, 9000), {"prompt": "q", "chosen": "x", "rejected": "x"}]))
    prepare = "  prep: {kind: data, files: [good.jsonl]}\n"
    report = checked(write, prepare + "  rm: {kind: reward, data: prep, heldout: judged.jsonl}\n")
    (found,) = [finding for finding in report.findings if finding.code == "pairs.identical"]
    assert (found.level, found.where.endswith("judged.jsonl:21")) == ("fatal", True)


EVALUATE = "  eval: {kind: evaluate, models: [tiny], prompts: held.jsonl}\n"


@pytest.mark.usefixtures("files")
def test_training_on_evaluation_prompts_is_fatal(write: Write) -> None:
    report = checked(write, "  rm: {kind: reward, data: good.jsonl}\n" + EVALUATE)
    (found,) = [finding for finding in report.data if finding.level == "fatal"]
    assert found.code == "leakage.exact"
    assert found.message.startswith("4 of 4 held-out items")
    assert not report.is_fit


@pytest.mark.usefixtures("files")
def test_decontamination_takes_care_of_it(write: Write) -> None:
    prepare = "  prep: {kind: data, files: [good.jsonl], decontaminate: [held.jsonl]}\n"
    report = checked(write, prepare + EVALUATE)
    assert levels(report)["leakage.exact"] == "info"
    assert report.is_fit


@pytest.mark.usefixtures("files")
def test_decontamination_against_another_file_does_not(write: Write) -> None:
    write("other.jsonl", lines([{"prompt": "Something else altogether, please?"}]))
    prepare = "  prep: {kind: data, files: [good.jsonl], decontaminate: [other.jsonl]}\n"
    assert levels(checked(write, prepare + EVALUATE))["leakage.exact"] == "fatal"


@pytest.mark.usefixtures("files")
def test_broken_lines_are_measured_by_what_the_stage_allows(write: Write) -> None:
    strict = checked(write, "  prep: {kind: data, files: [cut.jsonl]}\n")
    assert levels(strict)["data.unusable"] == "fatal"
    assert "1 of the 61 rows read are broken" in strict.stages[0].findings[0].message
    lax = checked(write, "  prep: {kind: data, files: [cut.jsonl], max_broken: 0.05}\n")
    assert lax.is_fit
    assert (
        lax.stages[0].lines[-1] == "files: 60 pairs in cut.jsonl, 1 broken line left out (kedge data check lists them)"
    )


@pytest.mark.usefixtures("files")
def test_the_wrong_kind_of_file_says_what_it_holds_and_what_is_needed(write: Write) -> None:
    report = checked(write, "  imitate: {kind: sft, data: good.jsonl}\n")
    (found,) = [finding for finding in report.findings if finding.level == "fatal"]
    assert found.where == "imitate.data"
    assert "holds pairs, recognised by prompt, chosen, rejected; demonstrations are needed here" in found.message
    assert "kedge data convert" in found.message


@pytest.mark.usefixtures("files")
def test_a_report_as_json_says_what_the_screen_says(write: Write) -> None:
    report = checked(write, "  rm: {kind: reward, data: good.jsonl}\n" + EVALUATE)
    told = json.loads(json.dumps(report.as_dict()))
    assert (told["name"], told["is_fit"], list(told["stages"])) == ("a", False, ["rm", "eval"])
    assert "leakage.exact" in {finding["code"] for finding in told["findings"]}


@pytest.mark.usefixtures("files")
def test_a_run_is_refused_before_it_starts_when_an_input_is_missing(write: Write) -> None:
    good = load_recipe(write("a.yaml", HEAD + "  rm: {kind: reward, data: good.jsonl}\n"))
    refuse_unfit(good)
    with pytest.raises(ConfigError, match=r"rm\.data: .*gold\.jsonl: no such file \(did you mean 'good\.jsonl'\?\)"):
        refuse_unfit(load_recipe(good.file, ["stages.rm.data=gold.jsonl"]))
    with pytest.raises(ConfigError, match=r"model tinny: no model named 'tinny' \(did you mean 'tiny'\?\)"):
        refuse_unfit(load_recipe(good.file, ["model=tinny"]))


REWARD = "{kind: mix, parts: {code: {kind: unit_tests}}}"
CODE = f"  best: {{kind: best_of_n, method: rejection, prompts: held.jsonl, reward: {REWARD}}}\n"


@pytest.mark.usefixtures("files")
def test_the_walls_around_the_code_of_answers_are_told(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    works = isolation.Trial(locks={"calls": True, "files": True, "nobody": True})
    monkeypatch.setattr(isolation, "tried", lambda layer, network: works)
    report = checked(write, CODE)
    (row,) = [row for row in report.checked if "isolation" in row.result]
    assert row.result.startswith("isolation bubblewrap (")
    assert "reward.isolation" not in levels(report)


@pytest.mark.usefixtures("files")
def test_a_machine_that_must_not_run_code_is_told_before_anything_is_trained(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "tried", lambda layer, network: isolation.Trial(locks={}, reason="not here"))
    report = checked(write, CODE)
    assert levels(report)["reward.isolation"] == "fatal"
    (finding,) = [finding for finding in report.findings if finding.code == "reward.isolation"]
    assert finding.where == "best.reward.parts.code"
    assert "apt-get install bubblewrap" in finding.message
