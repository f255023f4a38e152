from __future__ import annotations

import json
from pathlib import Path

import pytest

from kedge.core.errors import ModelError
from kedge.models.loading.resolve import resolve
from kedge.models.loading.tiny import make_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny-model")


def test_alias_gives_its_cached_folder(cache: Path) -> None:
    folder = resolve("tiny")
    assert isinstance(folder, Path)
    assert folder.parent == cache / "models"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_folder_is_taken_as_it_is(tiny: Path) -> None:
    assert resolve(str(tiny)) == resolve(tiny) == tiny


def test_hub_id_is_passed_on() -> None:
    assert resolve("HuggingFaceTB/SmolLM2-1.7B") == "HuggingFaceTB/SmolLM2-1.7B"


def test_folder_wins_over_hub_id(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent.parent)
    spelling = f"{tiny.parent.name}/{tiny.name}"
    assert resolve(spelling) == Path(spelling)


def test_unknown_alias_names_the_nearest() -> None:
    with pytest.raises(
        ModelError, match=r"no model named 'smolm2-135m' \(did you mean 'smollm2-135m'\?\); use an alias"
    ):
        resolve("smolm2-135m")


def test_missing_folder_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"no model folder at {tmp_path}/runs/a/model"):
        resolve("./runs/a/model")
    with pytest.raises(ModelError, match="no model folder at"):
        resolve(Path("a/b"))


def test_file_instead_of_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a file; a model is the folder that holds its config\.json"):
        resolve(str(file))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json; this is not a model folder"):
        resolve(tmp_path)


def test_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a LoRA adapter, not a model; merge it into its base first"):
        resolve(tmp_path)


def test_no_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights; expected model\.safetensors or model\.safetensors\.index\.json"):
        resolve(tiny)


def test_pickled_weights_are_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"only pickled weights \(pytorch_model\.bin\), and nothing is unpickled"
    ) as caught:
        resolve(tiny)
    assert "save_pretrained(folder)" in str(caught.value)


def test_missing_shard_is_named(tiny: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tiny / "model.safetensors").rename(tiny / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"1 of 2 weight files .* first model-00002-of-00002\.safetensors"):
        resolve(tiny)
    (tiny / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert resolve(tiny) == tiny


def test_no_tokenizer(tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json; copy the tokenizer files of the model"):
        resolve(tiny)
