"""Reward stages from end to end: rankings, two objectives, ensembles, and what plain transformers reads of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kedge.core.errors import ConfigError, ContractStop, DataError, ModelError
from kedge.core.files import hash_folder
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.ensemble import load_ensemble
from kedge.models.reward.reward_files import load
from kedge.models.reward.shared import members_on
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.stages.reward.settings import STAGE, RewardSettings
from kedge.testing import toy

Run = Callable[..., Path]
SHORT = "batch: 8, micro_batch: 4, max_length: 192, optimiser: {lr: 1e-3}"
QUESTION = "<|im_start|>user\nWhich colour?<|im_end|>\n<|im_start|>assistant\n"


def rankings(count: int, seed: int) -> list[dict[str, Any]]:
    """Four answers each, with ties, made from toy pairs of the same prompt."""
    rng = Random(seed)
    return [
        {
            "prompt": row["prompt"],
            "answers": [row["rejected"], row["chosen"], row["chosen"] + " Bye.", "No."],
            "rank": [2, 1, 1, rng.choice([2, 3])],
        }
        for row in toy.pairs(count, seed)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)

    def run_stage(stage: str, if_unfit: str = "go_on", **files: Iterable[Mapping[str, Any]]) -> Path:
        for name, rows in files.items():
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = f"{{kind: reward, {stage}, {SHORT}, if_unfit: {if_unfit}}}"
        text = f"kedge: 1\nname: short\nseed: 3\nmodel: ./tiny\nstages:\n  reward: {settings}\n"
        (tmp_path / "short.yaml").write_text(text)
        return (
            run_recipe(load_recipe(tmp_path / "short.yaml"), tmp_path / "runs", is_resumed=False, say=print) / "reward"
        )

    return run_stage


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_plain_transformers_agrees(folder: Path, expected_objectives: tuple[str, ...]) -> None:
    """Raw scores of a padded batch, by the saved tokenizer and nothing of Kedge."""
    reward = load(folder, dtype="float32")
    assert reward.objectives == expected_objectives
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{QUESTION}{answer}<|im_end|>" for answer in ("Red.", "It is a rather dark blue, I think.", "")]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        raw_BK = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    own_BK = reward.score_tokens(batch["input_ids"], batch["attention_mask"].bool(), normalised=False)
    assert raw_BK.shape == (3, len(expected_objectives))
    assert raw_BK.std(dim=0).min() > 1e-4  # they differ, so that agreeing means something
    torch.testing.assert_close(own_BK, raw_BK, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["plackett_luce", "all_pairs"])
def test_rankings_of_four(run: Run, loss: str) -> None:
    folder = run(
        f"data: k.jsonl, heldout: kh.jsonl, epochs: 3, loss: {{ranking: {loss}}}", k=rankings(64, 1), kh=rankings(40, 2)
    )
    logged = metrics(folder)
    assert len(logged) == 24
    assert logged[-1]["train/loss"] < logged[0]["train/loss"]
    assert logged[-1]["heldout/accuracy"] > 0.6
    report = json.loads((folder / "reward-report.json").read_text())
    # Every strict preference is a pair of the report: both of the first over both others, and 1 more if those differ.
    expected = sum(4 + (len(set(row["rank"])) == 3) for row in rankings(40, 2))
    assert report["pairs"] == expected
    assert_plain_transformers_agrees(folder / "model", ("reward",))


def test_two_objectives_pairs_for_one_and_rankings_for_the_other(run: Run) -> None:
    folder = run(
        "data: [p.jsonl, k.jsonl], heldout: [ph.jsonl, kh.jsonl], objectives: [helpful, brief]",
        p=toy.pairs(40, 1),
        k=rankings(40, 5),
        ph=toy.pairs(20, 2),
        kh=rankings(20, 6),
    )
    assert len(metrics(folder)) == 10
    assert_plain_transformers_agrees(folder / "model", ("helpful", "brief"))
    reward = load(folder / "model", dtype="float32")
    # The preferred training answers average 0 under each objective.
    best = [
        f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n{row['chosen']}<|im_end|>"
        for row in toy.pairs(40, 1)
    ]
    best += [
        f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n{row['answers'][1]}<|im_end|>"
        for row in rankings(40, 5)
    ]
    batch = reward.tokenizer(best, return_tensors="pt", padding=True)
    scores_BK = reward.score_tokens(batch["input_ids"], batch["attention_mask"].bool())
    torch.testing.assert_close(scores_BK.mean(dim=0), torch.zeros(2), rtol=0, atol=1e-5)
    assert reward.facts.normaliser.std == (1.0, 1.0)


def test_a_list_of_files_is_learnt_as_one_objective(run: Run) -> None:
    folder = run(
        "data: [p.jsonl, k.jsonl], heldout: [ph.jsonl, kh.jsonl]",
        p=toy.pairs(40, 1),
        k=rankings(40, 5),
        ph=toy.pairs(20, 2),
        kh=rankings(20, 6),
    )
    assert len(metrics(folder)) == 10
    assert_plain_transformers_agrees(folder / "model", ("reward",))


def test_a_run_that_was_not_checked_refuses_files_that_no_objective_has(run: Run) -> None:
    with pytest.raises(
        ConfigError, match=r"stages\.reward\.data: 3 file\(s\) of `data` for 2 objectives \(helpful, brief"
    ):
        run(
            "data: [p.jsonl, q.jsonl, r.jsonl], objectives: [helpful, brief]",
            **{name: toy.pairs(40, 1) for name in "pqr"},
        )


def test_lora_members_share_a_base_that_stays_as_it_was(run: Run, tmp_path: Path) -> None:
    content = hash_folder(tmp_path / "tiny")
    folder = run(
        "data: p.jsonl, heldout: ph.jsonl, members: 2, lora: {rank: 2}, combine: {kind: worst_case}",
        p=toy.pairs(60, 1),
        ph=toy.pairs(20, 2),
    )
    assert hash_folder(tmp_path / "tiny") == content
    ensemble = load_ensemble(folder / "model", dtype="float32")
    assert len(ensemble.members) == 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {member: [row["train/member_step"] for row in rows if row["train/member"] == member] for member in (1, 2)}
    assert len(steps[1]) + len(steps[2]) == len(rows)
    assert all(own == [step + 1 for step in range(len(own))] for own in steps.values())  # a step axis a member
    tokens_BT = torch.tensor([[257, 65, 66, 258], [257, 67, 258, 256]])
    out_of_fold = json.loads((folder / "out-of-fold.json").read_text())
    assert (out_of_fold["pairs"], out_of_fold["members"]) == (60, 1)
    report = json.loads((folder / "reward-report.json").read_text())
    assert f"{100 * out_of_fold['accuracy']['value']:.1f} % right" in report["facts"]["out of fold"]
    assert "of 60 training pairs" in report["facts"]["out of fold"]
    scores_MBK = ensemble.member_scores(tokens_BT, tokens_BT != 256)
    assert not torch.equal(scores_MBK[0], scores_MBK[1])
    assert torch.equal(ensemble.score_tokens(tokens_BT, tokens_BT != 256), scores_MBK.min(dim=0).values)


def test_lora_members_in_bfloat16_have_heads_in_float32(run: Run) -> None:
    folder = run(
        "data: p.jsonl, heldout: ph.jsonl, members: 2, lora: {rank: 2}, memory: {dtype: bfloat16}",
        p=toy.pairs(24, 1),
        ph=toy.pairs(20, 2),
    )
    assert len(load_ensemble(folder / "model", dtype="float32").members) == 2


def test_frozen_layers_stay_bit_equal_and_the_others_learn(run: Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "tiny")
    make_tiny(tmp_path / "tiny", hidden=32, layers=3)
    folder = run("data: p.jsonl, heldout: ph.jsonl, frozen_layers: 2", p=toy.pairs(40, 1), ph=toy.pairs(20, 2))
    before, after = (load_file(one / "model.safetensors") for one in (tmp_path / "tiny", folder / "model"))
    same = {name for name, one in after.items() if name in before and torch.equal(one, before[name])}
    assert same == {
        name for name in after if name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))
    }
    assert len(same) == 1 + 2 * 9
    assert len(after) == 1 + 3 * 9 + 2  # the embeddings, three blocks, the last norm and the head


def test_frozen_layers_and_lora_are_refused_by_the_check() -> None:
    asked = {"kind": "reward", "data": "p.jsonl", "frozen_layers": 1}
    assert list(STAGE.check(RewardSettings.model_validate(asked))) == []
    (found,) = STAGE.check(RewardSettings.model_validate({**asked, "lora": {}}))
    assert (found.level, found.code, found.where) == ("fatal", "reward.frozen_layers", "frozen_layers")


def test_more_frozen_layers_than_there_are(run: Run) -> None:
    with pytest.raises(ModelError, match=r"frozen_layers is 1, but .*tiny has 1 transformer blocks"):
        run("data: p.jsonl, heldout: ph.jsonl, frozen_layers: 1", p=toy.pairs(20, 1), ph=toy.pairs(5, 2))


def test_one_lora_model_keeps_its_adapter_for_its_base(run: Run, tmp_path: Path) -> None:
    folder = run("data: p.jsonl, heldout: ph.jsonl, lora: {rank: 2}", p=toy.pairs(40, 1), ph=toy.pairs(20, 2))
    found = members_on(folder / "model", hash_folder(tmp_path / "tiny", suffixes=(".safetensors",)))
    assert found is not None
    assert found.facts == (load(folder / "model").facts,)
    assert found.facts[0].max_length == 192


def test_heldout_that_shares_a_prompt_is_refused(run: Run) -> None:
    with pytest.raises(DataError, match=r"`heldout` shares 3 prompt\(s\) with `data`"):
        run("data: p.jsonl, heldout: ph.jsonl", p=toy.pairs(20, 1), ph=toy.pairs(20, 1)[:3])


def test_a_model_that_cannot_tell_answers_apart_stops_the_recipe_with_everything_saved(
    run: Run, tmp_path: Path
) -> None:
    coin = Random(1)
    pairs = [{"prompt": f"Say {number}", "chosen": coin.choice("ab"), "rejected": "c"} for number in range(12)]
    flipped = [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    held_out = [{**pair, "prompt": f"Tell {number}"} for number, pair in enumerate(flipped)]
    with pytest.raises(ContractStop, match="if_unfit=go_on"):
        run("data: p.jsonl, heldout: ph.jsonl, epochs: 4", if_unfit="stop", p=pairs, ph=held_out)
    folder = tmp_path / "runs/short/reward"
    assert (folder / "model/model.safetensors").exists()
    findings = json.loads((folder / "reward-report.json").read_text())["findings"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    by_code = {event["code"]: event for event in events}
    assert any(finding["fix"] for finding in findings)
    for finding in findings:
        event = by_code[finding["code"]]
        assert (event["level"], event["message"], event["evidence"]["fix"]) == (
            finding["level"],
            finding["message"],
            finding["fix"],
        )
