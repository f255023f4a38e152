"""`kedge models`: what is built in, and what is wrong with a model before anything is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_tiny(), tmp_path / "m"))


def test_the_list_names_the_built_in_models(kedge: Kedge) -> None:
    done = kedge("models", "list")
    assert done.code == 0
    names = [line.split()[0] for line in done.out.splitlines()[1:] if not line.startswith(" ")]
    assert names == ["tiny", "smollm2-135m"]


def test_fetching_tiny_gives_its_folder(kedge: Kedge) -> None:
    done = kedge("models", "fetch", "tiny")
    assert done.code == 0
    assert (Path(done.out.strip().removeprefix("tiny: ")) / "model.safetensors").is_file()


def test_fetching_an_unknown_name_names_those_there_are(kedge: Kedge) -> None:
    done = kedge("models", "fetch", "tinny")
    assert done.code == 2
    assert done.err.startswith("error: no built-in model named 'tinny' (did you mean 'tiny'?)")


def test_a_sound_model_is_described(kedge: Kedge, model: Path) -> None:
    done = kedge("models", "check", "m")
    assert done.code == 0
    # 259 × 96 embeddings; 2 layers of 2·96² + 2·96·48 attention, 3·96·288 MLP and 2·96 norms; a last norm of 96
    assert 259 * 96 + 2 * (2 * 96**2 + 2 * 96 * 48 + 3 * 96 * 288 + 2 * 96) + 96 == 246_528
    assert done.out.startswith("m: LlamaForCausalLM, 246,528 parameters, ")
    assert "window 1,024, vocabulary 259" in done.out
    assert "✗" not in done.out


def test_a_model_without_a_tokenizer_says_what_is_missing_and_what_to_do(kedge: Kedge, model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()
    done = kedge("models", "check", "m")
    assert done.code == 2
    assert done.out.splitlines() == [
        "m: cannot be used",
        "  ✗ m: no tokenizer.json; copy the tokenizer files of the model that this one was trained from",
    ]


def test_a_tokenizer_without_a_chat_template_is_unfit(kedge: Kedge, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    done = kedge("models", "check", "m")
    assert done.code == 2
    assert "✗ this tokenizer has no chat template, so messages cannot be turned into text" in done.out


def test_a_model_that_is_not_there_says_what_could_be(kedge: Kedge) -> None:
    done = kedge("models", "check", "tinny")
    assert done.code == 2
    assert "✗ no model named 'tinny' (did you mean 'tiny'?); use an alias (tiny, smollm2-135m), a folder" in done.out


def test_a_damaged_config_is_one_message(kedge: Kedge, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama"})[:-3])
    done = kedge("models", "check", "m")
    assert done.code == 2
    assert "m: cannot be used" in done.out
    assert "Traceback" not in done.out + done.err
