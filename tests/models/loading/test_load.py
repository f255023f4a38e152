from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kedge.core.errors import ModelError
from kedge.models.loading import load
from kedge.models.loading.load import dtype_for, load_causal
from kedge.models.loading.tiny import make_tiny, tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny-model")


def test_loads_the_weights_in_the_type_asked_for(tiny: Path) -> None:
    expected = tiny_model().model.embed_tokens.weight
    whole = load_causal(tiny, dtype="float32")
    assert not whole.training
    assert torch.equal(whole.get_input_embeddings().weight, expected)
    half = load_causal(tiny, dtype="bfloat16")
    assert torch.equal(half.get_input_embeddings().weight, expected.bfloat16())


def test_attention_can_be_named(tiny: Path) -> None:
    assert load_causal(tiny, attn="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("flags", ["avx2 avx512f", "avx512_bf16", "amx_bf16", ""])
def test_no_flag_of_the_cpu_changes_the_type(flags: str, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Whoever asks the system, by whatever door, gets these flags: on a CPU all is float32 without being asked."""
    has_bf16 = "bf16" in flags
    real_read = Path.read_text

    def read_text(path: Path, *args: Any, **named: Any) -> str:
        return f"flags : {flags}\n" if str(path) == "/proc/cpuinfo" else real_read(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if has_bf16 else "DEFAULT")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_vnni_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: has_bf16, raising=False)
    assert dtype_for("auto", "cpu") == torch.float32
    assert load_causal(tiny).dtype == torch.float32
    assert dtype_for("float16", "cpu") == torch.float16


_CPU_QUERIES = re.compile(
    r"cpuinfo|avx512|avx_512|amx_|get_cpu_capability|torch\.cpu\._is|is_bf16_supported|mkldnn", re.IGNORECASE
)


def test_no_file_asks_what_the_cpu_can_do() -> None:
    """The one question left is that of a GPU, in `dtype_for`."""
    source = Path(load.__file__).parents[2]
    queries = [
        f"{file.relative_to(source)}: {line.strip()}"
        for file in sorted(source.rglob("*.py"))
        for line in file.read_text().splitlines()
        if _CPU_QUERIES.search(line)
    ]
    (query,) = queries
    assert "torch.cuda.is_bf16_supported" in query


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_cuda_type(supported: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert dtype_for("auto", "cuda:1") == expected


def test_missing_weights_are_refused(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 weight\(s\) .* not in the files \(first: 'model\.layers\.1\.mlp\.up_proj\.weight'\)"
    ):
        load_causal(tiny)


def test_remote_code_needs_to_be_asked_for(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tiny / "config.json").write_text(json.dumps(config))
    (tiny / "own.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(ModelError, match="brings its own Python code, which is not run unless you ask"):
        load_causal(tiny)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelError, match=r"hub model 'no-such-org/nothing' could not be loaded \(no network, HF_HUB_OFFLINE"
    ):
        load_causal("no-such-org/nothing")


def test_unknown_architecture_names_the_folder(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"model_type": "no_such_model"}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"tiny-model: cannot be loaded as a causal language model: .*no_such_model"):
        load_causal(tiny)


def test_a_base_of_few_bits_does_not_warn_at_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "refuse_bits", lambda bits, device: None)
    of_products = logging.getLogger("bitsandbytes.autograd._functions")
    monkeypatch.setattr(of_products, "level", logging.NOTSET)
    assert of_products.isEnabledFor(logging.WARNING)
    load.quantisation(8, "cuda")
    assert not of_products.isEnabledFor(logging.WARNING)
