"""The files of each target, written into an empty folder; and the weights as that target rounds them.

| target | files |
|---|---|
| hf | config, weights, tokenizer: what transformers loads |
| vllm | the same, in a type that servers compute in, with a template that every server renders |
| adapter | the LoRA adapter alone, as peft loads it, and the tokenizer |
| gguf | one file with weights, tokenizer and template |
| ollama | the same file, and a Modelfile |
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kedge.commands.export.templates import GoTemplate, go_template, modelfile, without_marks
from kedge.core.files import write_json, write_text
from kedge.data.examples import Message
from kedge.data.template import render
from kedge.models.forward.merging import merge
from kedge.models.loading.adapters import BASE, CONFIG, WEIGHTS, find_base, load_adapter
from kedge.models.loading.describe import window_of
from kedge.models.loading.gguf import open_gguf, read_causal, tokenizer_from
from kedge.models.loading.gguf_vocabulary import Vocabulary, vocabulary_of
from kedge.models.loading.gguf_write import Quantisation, round_as_stored, write_gguf
from kedge.models.loading.load import auto_tokenizer, load_causal, no_bars
from kedge.models.loading.start import SHARD_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Target = Literal["hf", "gguf", "adapter", "vllm", "ollama"]
SavedDType = Literal["float32", "bfloat16", "float16"]
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LONGEST_CONTEXT = 8192
"""Tokens that Ollama reserves memory for unless asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What is exported: the model in float32, its tokenizer, and the tokens that end an answer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ends: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a target is written, what rounding it brings, and how it is read back."""

    write: Callable[[Path], None]
    round: Callable[[], None]
    """Gives the weights of the material, in place and once it is written, the values that the format rounds them to."""
    read: Callable[[Path], PreTrainedModel]
    as_saved: Callable[[PreTrainedModel], PreTrainedModel]
    """What was read back as the source was saved: the same model, or an adapter merged into its base and rounded."""
    has_all_weights: bool
    """Whether what is read back has the material's own weights, and not a base and an adapter."""
    tokenizer: Callable[[Path], PreTrainedTokenizerBase]


def folder_format(material: Material, *, dtype: SavedDType, has_marks: bool) -> Format:
    """The Hugging Face layout. Without `has_marks` the template is written without the marks of training."""
    model, tokenizer = material.model, material.tokenizer
    if not has_marks and tokenizer.chat_template:
        template = without_marks(tokenizer.get_chat_template())
        tokenizer = deepcopy(tokenizer)
        tokenizer.chat_template = template

    def write(folder: Path) -> None:
        config: Any = model.generation_config
        config.eos_token_id, config.pad_token_id = sorted(material.ends), tokenizer.pad_token_id
        with no_bars():
            _cast_weights(model, _TORCH[dtype])
            model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
            tokenizer.save_pretrained(folder)
        _cast_weights(model, torch.float32)

    return Format(
        write=write,
        round=lambda: None,  # writing has rounded it
        read=lambda folder: load_causal(folder, dtype="float32"),
        as_saved=lambda model: model,
        has_all_weights=True,
        tokenizer=auto_tokenizer,
    )


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Weights alone: tables that are computed (those of rotary positions) are not in the file, and rounded ones here
    would differ from what is read back."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def adapter_format(material: Material, adapter: Path, *, saved: SavedDType, keeps_path: bool) -> Format:
    """The adapter of a stage, checked against the merged model that the stage made and `saved` in that type.

    Without `keeps_path` a folder of this machine is not named as its base.
    """
    record: dict[str, str] = json.loads((adapter / BASE).read_text(encoding="utf-8"))
    base = find_base(adapter, record, None)

    def write(folder: Path) -> None:
        config: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
        named = str(base) if keeps_path or "hash" not in record else None
        write_json(folder / CONFIG, {**config, "base_model_name_or_path": named})
        shutil.copyfile(adapter / WEIGHTS, folder / WEIGHTS)
        material.tokenizer.save_pretrained(folder)

    def merged(adapted: PreTrainedModel) -> PreTrainedModel:
        model = merge(adapted)
        _cast_weights(model, _TORCH[saved])
        _cast_weights(model, torch.float32)
        return model

    return Format(
        write=write,
        round=lambda: None,
        read=lambda folder: load_adapter(load_causal(base, dtype="float32"), folder, name="policy"),
        as_saved=merged,
        has_all_weights=False,
        tokenizer=auto_tokenizer,
    )


def gguf_format(material: Material, *, quantisation: Quantisation, ollama: bool) -> Format:
    """One GGUF file; for Ollama with a Modelfile beside it."""
    tokenizer, config = material.tokenizer, material.model.config
    vocabulary = gguf_vocabulary(material)
    template = without_marks(tokenizer.get_chat_template()) if tokenizer.chat_template else None
    go: GoTemplate | None = go_template(tokenizer, adds_bos=vocabulary.adds_bos) if ollama else None
    file = f"{material.name}-{quantisation}.gguf"

    def write(folder: Path) -> None:
        write_gguf(
            material.model,
            vocabulary,
            folder / file,
            quantisation=quantisation,
            name=material.name,
            chat_template=template,
        )
        if go is not None:
            window = min(window_of(config) or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
            write_text(folder / "Modelfile", modelfile(go, file=file, window=window))

    return Format(
        write=write,
        round=lambda: round_as_stored(material.model, quantisation),
        read=lambda folder: read_causal(open_gguf(folder / file)),
        as_saved=lambda model: model,
        has_all_weights=True,
        tokenizer=lambda folder: tokenizer_from(open_gguf(folder / file)),
    )


def gguf_vocabulary(material: Material) -> Vocabulary:
    """The tokenizer for a GGUF file. Its readers are asked to put the begin token before a text only where the model's
    template begins with it too: Kedge's models have seen what the template writes, and nothing else."""
    tokenizer, size = material.tokenizer, material.model.config.get_text_config().vocab_size
    vocabulary = vocabulary_of(tokenizer, size=size, ends=material.ends)
    if not tokenizer.chat_template:
        return vocabulary
    text = render(tokenizer, (Message("user", "Hi"),), add_generation_prompt=True)
    bos = str(tokenizer.bos_token or "")
    return replace(vocabulary, adds_bos=vocabulary.adds_bos and text.startswith(bos), adds_eos=False)
