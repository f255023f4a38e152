"""`kedge check` as a user runs it: reports, masks, the schema, several recipes at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.testing import toy

Kedge = Callable[..., Any]

HEAD = "kedge: 1\nname: a\nmodel: tiny\nstages:\n"
SFT = HEAD + "  imitate: {kind: sft, data: data/demonstrations.jsonl, batch: 24, micro_batch: 5}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write(tmp_path / "data", 40, seed=3)
    (tmp_path / "sft.yaml").write_text(SFT)
    (tmp_path / "typo.yaml").write_text(SFT.replace("batch: 24", "bach: 24"))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_fit_recipe_tells_model_data_and_batch_arithmetic(kedge: Kedge) -> None:
    done = kedge("check", "sft.yaml")
    assert (done.code, done.err) == (0, "")
    assert _without_disk(done.out) == [
        "sft.yaml",
        "  model tiny: LlamaForCausalLM, 246,528 parameters, 0.9 MiB in float32, window 1,024, vocabulary 259",
        "  imitate (sft)",
        "    each optimiser step: 24 conversations, as 5 micro-batches (4 of 5 and one of 4); 1 pass over the data",
        "    data: 40 demonstrations in demonstrations.jsonl",
        "  checked",
        "  fit to run",
        "",
    ]


def _without_disk(out: str) -> list[str]:
    """What was printed, without the line about the space on this disk."""
    return [line for line in out.splitlines() if not line.startswith("    disk")]


@pytest.mark.usefixtures("folder")
def test_a_broken_recipe_does_not_keep_the_next_from_being_checked(kedge: Kedge) -> None:
    done = kedge("check", "typo.yaml", "gone.yaml", "sft.yaml")
    assert done.code == 2
    assert (
        "typo.yaml: 1 problem(s)\n  line 5: stages.imitate.bach: not a setting here (did you mean 'batch'?)" in done.err
    )
    assert "gone.yaml: there is no such recipe" in done.err
    assert "  fit to run\n" in done.out


@pytest.mark.usefixtures("folder")
def test_json_has_one_entry_a_recipe_broken_ones_too(kedge: Kedge) -> None:
    done = kedge("check", "typo.yaml", "sft.yaml", "--json")
    assert done.code == 2
    broken, good = json.loads(done.out)
    assert (broken["file"], broken["is_fit"]) == ("typo.yaml", False)
    assert "did you mean 'batch'?" in broken["error"]
    assert (good["file"], good["is_fit"], good["stages"]["imitate"]["kind"]) == ("sft.yaml", True, "sft")


@pytest.mark.usefixtures("folder")
def test_masks_show_what_is_trained(kedge: Kedge, folder: Path) -> None:
    done = kedge("check", "sft.yaml", "--show-masks")
    assert done.code == 0
    shown = done.out.split("fit to run", 1)[1]
    rows = [json.loads(line) for line in (folder / "data/demonstrations.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows[:2], start=1):
        assert f"imitate: data/demonstrations.jsonl:{number} (⟦…⟧ is trained)" in shown
        assert row["messages"][0]["content"] in shown
        assert row["messages"][1]["content"] in shown
    assert rows[2]["messages"][0]["content"] not in shown
    assert "\x1b" not in done.out


@pytest.mark.usefixtures("folder")
def test_masks_and_json_do_not_go_together(kedge: Kedge) -> None:
    done = kedge("check", "sft.yaml", "--show-masks", "--json")
    assert (done.code, done.out) == (2, "")
    assert "leave one out" in done.err


@pytest.mark.usefixtures("folder")
def test_an_override_counts_as_if_it_were_written(kedge: Kedge) -> None:
    done = kedge("check", "sft.yaml", "--set", "stages.imitate.batch=7", "--set", "stages.imitate.max_length=4096")
    assert done.code == 2
    assert "each optimiser step: 7 conversations" in done.out
    assert "✗ imitate: 4096 tokens are asked for, but tiny has a window of 1024" in done.out
    assert "→ ask for at most 1024" in done.out
    assert "not fit to run: 1 fatal" in done.out


@pytest.mark.parametrize(
    ("method", "kind", "problem"),
    [
        ("dpo", "thumbs", "holds thumbs, recognised by prompt, completion, label; pairs are needed here"),
        ("kto", "rankings", "holds rankings, recognised by prompt, answers, rank; thumbs are needed here"),
        ("kto", "thumbs", ""),
        ("kto", "pairs", ""),
        ("dpo", "rankings", ""),
    ],
)
def test_what_a_preference_method_can_learn_from_depends_on_it(
    kedge: Kedge, folder: Path, method: str, kind: str, problem: str
) -> None:
    rows = {
        "thumbs": [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(20)],
        "pairs": [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(20)],
        "rankings": [{"prompt": f"q{n}", "answers": ["yes", "no"], "rank": [1, 2]} for n in range(20)],
    }
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, rows[kind])))
    (folder / "learn.yaml").write_text(
        "kedge: 1\nname: learn\nmodel: tiny\n"
        f"stages:\n  p: {{kind: preference, method: {method}, data: judged.jsonl}}\n"
    )
    done = kedge("check", "learn.yaml")
    assert done.code == (2 if problem else 0), done.out + done.err
    assert problem in done.out


def test_a_ppo_recipe_tells_the_arithmetic_of_an_iteration(kedge: Kedge, folder: Path) -> None:
    (folder / "ppo.yaml").write_text(
        SFT + "  rm: {kind: reward, data: data/pairs.jsonl}\n"
        "  ppo: {kind: ppo, from: imitate, reward: rm, prompts: data/prompts.jsonl, max_prompt_tokens: 200,\n"
        "        iterations: 50, batch: 12, answers: 2, epochs: 3, minibatches: 4, micro_batch: 5}\n"
    )
    done = kedge("check", "ppo.yaml")
    assert done.code == 0
    told = _without_disk(done.out)
    assert told[told.index("  ppo") + 1 :] == [
        "    each iteration: 12 prompts × 2 answers = 24 responses; 3 epochs × 4 minibatches = 12 optimiser steps of 6 "
        "responses, each as 2 micro-batches (1 of 5 and one of 1)",
        "    50 iterations: 1,200 responses in all",
        "    memory of the roles, about:",
        "      role        shared MB    own MB  learning MB  weights that learn",
        "      base              0.0       1.0          0.0                   0",
        "      actor             1.0       0.2          0.5              43,008",
        "      critic            1.0       0.2          0.5              43,008",
        "      reference         1.0       0.0          0.0                   0",
        "      reward            0.0       1.0          0.0                   0",
        "      total                       2.3          1.0              86,016",
        "    from: what imitate makes (model)",
        "    reward: what rm makes (model)",
        "    prompts: 40 prompts in prompts.jsonl",
        "  checked",
        "    prompts       prompts.jsonl  40; longest 82 of 200 tokens (ppo.prompts)",
        "    reward model  rm             what rm makes (ppo.reward)",
        "  fit to run",
        "",
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("minibatches: 9", "9 minibatches cannot be cut from 8 responses"),
        ("kl: {start: 0}", "kl.start is 0 and there is no kl.limit: nothing holds the policy to the reference"),
        ("kl: {start: 0, target: 4}", "a coefficient of 0 stays 0 however it is steered to kl.target"),
        ("critic_warmup: 3, iterations: 3", "critic_warmup 3 leaves none of 3 iterations in which the policy learns"),
        (
            "scores: {overlong_buffer: 300}",
            "scores.overlong_buffer 300 is more than the longest answer, sampling.max_new_tokens 256",
        ),
        (
            "scores: {length: {price: 0.1, least: 300, most: 400}}",
            "scores.length.least 300 is more than the longest answer, sampling.max_new_tokens 256",
        ),
        ("max_prompt_tokens: 4096", "4096 tokens are asked for, but tiny has a window of 1024"),
    ],
)
def test_a_ppo_recipe_that_cannot_learn_is_said_so(kedge: Kedge, folder: Path, settings: str, problem: str) -> None:
    stage = f"kind: ppo, reward: ./rm, prompts: data/prompts.jsonl, max_prompt_tokens: 200, batch: 8, {settings}"
    stage = stage.replace("max_prompt_tokens: 200, ", "") if "max_prompt" in settings else stage
    (folder / "ppo.yaml").write_text(f"{HEAD}  ppo: {{{stage}}}\n")
    assert problem in kedge("check", "ppo.yaml").out


def test_without_a_recipe_the_command_says_what_it_wants(kedge: Kedge) -> None:
    done = kedge("check")
    assert done.code == 2
    assert done.err == "error: kedge check: name at least one recipe, or --schema\n"


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_the_schema_is_json_whose_references_all_resolve(kedge: Kedge) -> None:
    done = kedge("check", "--schema")
    assert done.code == 0
    schema = json.loads(done.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    assert {"kedge", "name", "model", "stages"} == set(schema["required"])
    found = set(references(schema))
    assert "#/$defs/stage.sft" in found
    assert {reference.removeprefix("#/$defs/") for reference in found} <= set(schema["$defs"])
    for stage in ("data", "sft", "reward", "ppo", "evaluate"):
        assert schema["$defs"][f"stage.{stage}"]["properties"]["kind"]["const"] == stage
