"""Preference stages from end to end: what is told, kept, left out and refused, and what a layout must not change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from kedge.core.errors import DataError
from kedge.core.files import hash_folder
from kedge.models.loading.tiny import make_tiny
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runs import Run, new_manifest
from kedge.runs.folder import RunTracker
from kedge.stages.preference.displacement import warn_of_displacement
from kedge.stages.preference.settings import STAGE, PreferenceSettings
from kedge.stages.shared.context import Context
from kedge.testing import toy

RunStage = Callable[..., Path]
SHORT = "batch: 8, micro_batch: 4, max_length: 192, samples: 0"
START = {  # what each loss is before anything is learnt, as far as it can be known
    "dpo": math.log(2),
    "ipo": 25.0,  # (0 - 1 / (2 · 0.1))²
    "kto": 0.5,
    "tdpo": math.log(2),
}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    return [row for row in toy.pairs(3 * count, seed) if len(str(row)) < 190][:count]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStage:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    make_tiny(tmp_path / "tiny", hidden=32, layers=1)

    def run_stage(stage: str, *, name: str = "short", **files: Iterable[Mapping[str, Any]]) -> Path:
        for file, made in {"p": rows(24, 1), "ph": rows(8, 2), **files}.items():
            (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        text = f"kedge: 1\nname: {name}\nseed: 3\nmodel: ./tiny\nstages:\n  train: {{kind: preference, {stage}}}\n"
        (tmp_path / "short.yaml").write_text(text)
        runs = tmp_path / "runs"
        return run_recipe(load_recipe(tmp_path / "short.yaml"), runs, is_resumed=False, say=print) / "train"

    return run_stage


def records(folder: Path, journal: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{journal}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo", "simpo", "cpo", "kto", "tdpo"])
def test_every_method_learns_from_its_data(run: RunStage, method: str) -> None:
    how = "epochs: 3, batch: 8, max_length: 192, samples: 2, sample_tokens: 4, optimiser: {lr: 3e-3}"
    folder = run(f"method: {method}, data: p.jsonl, heldout: ph.jsonl, {how}")
    start, *logged = records(folder, "metrics")
    assert [one["step"] for one in logged] == list(range(1, (18 if method == "kto" else 9) + 1))
    assert start["step"] == 0
    assert "train/loss" not in start
    if method in START:
        assert start["heldout/loss"] == pytest.approx(START[method], rel=1e-5)
        assert logged[0]["train/loss"] == pytest.approx(START[method], rel=1e-5)
        assert start["heldout/chosen_drift"] == pytest.approx(0, abs=1e-4)
    assert logged[-1]["heldout/loss"] < start["heldout/loss"]
    if method == "kto":
        assert [abs(one["train/anchor"]) > 0.1 for one in logged[1:]] == [True] * 17  # asked of the policy as it is
    assert (folder / "reference.safetensors").exists() == (method not in ("orpo", "simpo", "cpo"))
    sampled = [(one["step"], one["number"]) for one in records(folder, "samples")]
    assert sampled == [(0, 0), (0, 1), (len(logged), 0), (len(logged), 1)]
    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.vocab_size == 259


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_micro_batch_changes_neither_the_loss_nor_the_run(run: RunStage, method: str) -> None:
    found: list[list[tuple[float, float]]] = []
    for number, layout in enumerate(("micro_batch: 8", "micro_batch: 1", "micro_batch: 3")):
        how = f"method: {method}, data: p.jsonl, heldout: ph.jsonl, batch: 8, max_length: 192, samples: 0"
        folder = run(f"{how}, {layout}, optimiser: {{lr: 1e-3}}", name=f"run-{number}")
        found.append([(one.get("train/loss", 0.0), one.get("heldout/loss", 0.0)) for one in records(folder, "metrics")])
    assert len(found[0]) == (7 if method == "kto" else 4)
    for other in found[1:]:
        assert [x for pair in other for x in pair] == pytest.approx([x for pair in found[0] for x in pair], rel=1e-4)


def test_with_adapters_the_base_stays_and_is_the_reference(run: RunStage, tmp_path: Path) -> None:
    content = hash_folder(tmp_path / "tiny")
    full = run(f"data: p.jsonl, {SHORT}, optimiser: {{lr: 1e-3}}", name="full")
    adapted = run(f"data: p.jsonl, {SHORT}, lora: {{rank: 2}}, optimiser: {{lr: 1e-2}}", name="adapted")
    assert hash_folder(tmp_path / "tiny") == content
    assert len(list((tmp_path / "cache/reference-logprobs").iterdir())) == 1  # one reference for both
    logged = records(adapted, "metrics")
    assert logged[0]["heldout/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert logged[-1]["train/loss"] != logged[1]["train/loss"]
    assert records(full, "metrics")[0]["heldout/chosen_logp"] == pytest.approx(logged[0]["heldout/chosen_logp"])
    plain = AutoModelForCausalLM.from_pretrained(adapted / "model")
    assert not any("lora" in name for name, _ in plain.named_parameters())


def test_what_is_left_out_is_told(run: RunStage) -> None:
    odd = [
        {"prompt": "Same?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Long?", "chosen": "x" * 300, "rejected": "Yes."},
    ]
    folder = run(f"data: p.jsonl, heldout_share: 0.25, {SHORT}", p=[*rows(16, 1), *odd])
    told = [one["message"] for one in records(folder, "events")]
    assert "12 pairs to learn, 4 held out by prompt" in told
    assert "1 pairs of `data` are longer than 192 tokens: left out" in told
    assert "1 pairs of `data` prefer an answer to itself: left out" in told


def test_held_out_prompts_that_are_trained_on_are_refused(run: RunStage) -> None:
    with pytest.raises(DataError, match=r"`heldout` shares 3 prompt\(s\) with `data`"):
        run(f"data: p.jsonl, heldout: ph.jsonl, {SHORT}", ph=rows(24, 1)[:3])


def test_rankings_and_thumbs(run: RunStage) -> None:
    ranked = [
        {"prompt": row["prompt"], "answers": [row["rejected"], row["chosen"], "No."], "rank": [2, 1, 3]}
        for row in rows(8, 1)
    ]
    folder = run(f"data: p.jsonl, heldout: ph.jsonl, {SHORT}", p=ranked, name="ranked")
    assert "24 pairs to learn, 8 held out by prompt" in [one["message"] for one in records(folder, "events")]
    liked = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in rows(9, 1)]
    disliked = [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in rows(3, 3)]
    folder = run(f"method: kto, data: p.jsonl, heldout: ph.jsonl, {SHORT}", p=[*liked, *disliked], name="thumbs")
    assert "12 answers to learn, 16 held out by prompt" in [one["message"] for one in records(folder, "events")]


# Displacement


def test_displacement_is_reported_once_and_only_beyond_the_allowed_fall(tmp_path: Path) -> None:
    lines: list[str] = []
    with Run.create(tmp_path / "run", manifest=new_manifest(name="a", kind="preference", seed=0, settings={})) as run:
        context = Context(
            name="train",
            seed=0,
            run=run,
            tracker=RunTracker(run),
            device="cpu",
            chat_template=None,
            recipe_folder=tmp_path,
            sources={},
            say=lines.append,
        )
        run.log({"reward/mean": 1.0}, 0)
        run.log({"heldout/chosen_logp": -50.0}, 0)
        for step, value in ((2, -54.9), (3, -40.0), (4, -55.2), (5, -80.0)):
            warn_of_displacement(context, value, step=step)
        events = run.read_events()
        assert [(event["step"], event["level"], event["code"]) for event in events] == [
            (4, "warning", "preference.displacement")
        ]
        assert events[0]["evidence"] == {"start": -50.0, "now": -55.2, "allowed_fall": 0.1}
        assert "from -50.0 to -55.2 nats" in lines[0]
        assert len(lines) == 1
        # A run that is resumed before the warning writes it again.
        run.resume_at(3)
        warn_of_displacement(context, -60.0, step=4)
        codes = [event["code"] for event in run.read_events()]
        assert codes.count("preference.displacement") == 1


# Settings


def settings(**given: Any) -> PreferenceSettings:
    return PreferenceSettings.model_validate({"kind": "preference", "data": "p.jsonl", **given})


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 5e-7),
        ({"lora": {}}, 5e-6),
        ({"method": "orpo"}, 8e-6),
        ({"method": "orpo", "lora": {"rank": 4}}, 8e-5),
        ({"method": {"kind": "orpo", "beta": 0.2}}, 8e-6),
        ({"method": "simpo", "optimiser": {"lr": 1e-6}}, 1e-6),
        ({"method": "orpo", "optimiser": {"schedule": "linear"}}, 8e-6),
    ],
)
def test_the_rate_is_the_published_one_for_the_method(given: dict[str, Any], rate: float) -> None:
    found = settings(**given)
    assert found.optimiser.lr == pytest.approx(rate)
    assert found.optimiser.warmup == 0.1
    assert PreferenceSettings.model_validate(found.model_dump(by_alias=True)) == found
    assert PreferenceSettings.model_validate_json(found.model_dump_json(by_alias=True)) == found


def test_a_loss_that_sorts_needs_the_whole_step_at_once() -> None:
    with pytest.raises(ValidationError, match=r"'aot' sorts over a whole step.*micro_batch is 8.*the batch, 64"):
        settings(method={"kind": "dpo", "loss": "aot"}, micro_batch=8)
    assert settings(method={"kind": "dpo", "loss": "aot"}, micro_batch=64).batch == 64
    assert "as 1 micro-batch of 64" in STAGE.explain(settings(method={"kind": "dpo", "loss": "aot"}))[0]


def test_the_arithmetic_in_words() -> None:
    assert STAGE.explain(settings()) == [
        "each optimiser step: 64 pairs, in passes of at most N tokens, chosen at the start; 1 pass over the data",
        "dpo: the reference is asked once, before training, and its log-probs are kept",
    ]
    assert STAGE.explain(settings(method="kto"))[:1] == [
        "each optimiser step: 64 answers, in passes of at most N tokens, chosen at the start; 1 pass over the data",
    ]
    assert STAGE.explain(settings(method="cpo"))[-1] == "cpo: no reference"
    assert STAGE.explain(settings(method="tdpo"))[-1] == (
        "tdpo: the reference, a second model in memory, is asked at every step"
    )
    assert "without its adapters" in STAGE.explain(settings(method="tdpo", lora={}))[-1]


def test_kto_with_few_answers_a_step_is_warned_of() -> None:
    (found,) = STAGE.check(settings(method="kto", batch=4))
    assert (found.level, found.code, found.where) == ("warning", "preference.few_answers", "batch")
    assert list(STAGE.check(settings(method="kto", batch=8))) == []
    assert list(STAGE.check(settings(method="dpo", batch=4))) == []
