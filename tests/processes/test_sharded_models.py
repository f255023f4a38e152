"""Sharded models are read part by part and saved weight by weight: as one process reads and saves them, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import sharded_models
from tests.processes.pool import Pool
from transformers import AutoModelForCausalLM, GPTNeoXConfig
from transformers.core_model_loading import revert_weight_conversion

from kedge.core.world import ALONE
from kedge.models.loading.unread import without_weights
from kedge.testing.contracts.roles import assert_same_state


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sharded_models.write_models(folder)
    return folder


READ = [
    "several files",
    "other name",
    "stored twice",
    "sent",
    "adapter on an adapter",
    "reward model",
    "ensemble",
    "merged member",
]
SAVED = [
    "tied float32",
    "other name float32",
    "experts float32",
    "several files bfloat16",
    "adapter, bfloat16 float32",
    "ensemble float32",
]


def slow_but(quick: list[str], names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(READ, [*sharded_models.MODELS]))
def test_every_process_reads_its_part_of_what_one_reads(pool: Pool, models: Path, name: str) -> None:
    expected = sharded_models.read_model(ALONE, models, name)
    for size in (2, 3) if name in ("several files", "sent") else (2,):
        for found in pool.run(sharded_models.read_model, models, name, size=size):
            note = found.pop("note")
            assert ("process 0 reads all of" in note) == (name in sharded_models.SENT), note
            assert_same_state(found, {key: value for key, value in expected.items() if key != "note"})


@pytest.mark.parametrize(
    "case", slow_but(SAVED, [f"{name} {dtype}" for name in sharded_models.SAVED for dtype in ("float32", "bfloat16")])
)
def test_what_is_saved_is_to_the_byte_what_one_process_saves(
    pool: Pool, models: Path, case: str, tmp_path: Path
) -> None:
    name, _, dtype = case.rpartition(" ")
    sharded_models.save_model(ALONE, models, name, tmp_path / "one" / "run", dtype)
    pool.run(sharded_models.save_model, models, name, tmp_path / "two" / "run", dtype)
    expected, found = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "one", tmp_path / "two")
    )
    assert len([file for file in expected if file.startswith("run/model/model-0")]) > 1, "one file only"
    assert sorted(found) == sorted(expected)
    assert [file for file in expected if found[file] != expected[file]] == []


def test_a_model_of_a_hub_is_saved_as_files_of_its_kind_are() -> None:
    """Only process 0 sees its files, and all must write by the same names."""
    config = GPTNeoXConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model, _ = without_weights(AutoModelForCausalLM, "some/where", config, dtype=torch.float32, read=pytest.fail)
    saved = revert_weight_conversion(model, model.state_dict())
    assert {"embed_out.weight"} == saved.keys() - model.state_dict().keys()


def test_no_process_ever_holds_more_than_its_part_and_a_layer(tmp_path: Path) -> None:
    sharded_models.write_large(tmp_path / "large")
    with Pool(2) as fresh:
        for facts in fresh.run(sharded_models.peak_memory, tmp_path / "large", tmp_path / "saved"):
            print({name: round(share, 3) for name, share in facts.items()})
            room = facts["layer"] + 0.08  # libraries that are loaded, buffers of files
            assert facts["read"] < 1 / 2 + room, facts
            assert facts["resume"] < 1 / 2 + room, facts
            for act in ("save", "checkpoint", "hash"):
                assert facts[act] < room, (act, facts)


def test_what_process_0_cannot_write_all_refuse(pool: Pool, models: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").touch()
    words = pool.run(sharded_models.fail_to_save, models, tmp_path / "model")
    refusal = "exists and holds no model, so it is not replaced; give another folder"
    assert words == [f"ModelError: {tmp_path / 'model'} {refusal}"] * 2
