"""Causal language models before and after training: loaded with what is trainable, frozen in part, and saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.core.errors import ModelError
from kedge.core.files import fsync_folder, run_errors, write_json
from kedge.core.world import ALONE, World, once
from kedge.models.forward.lora import (
    LoraLinear,
    adapters_of,
    has_adapters,
    is_quantised,
    required_adapters,
    with_lora,
)
from kedge.models.forward.merging import merge, merge_anew
from kedge.models.forward.parts import gathered
from kedge.models.forward.reader import compile_layers
from kedge.models.forward.sharding import blocks_of, is_sharded
from kedge.models.loading.adapters import BASE, CONFIG, base_record, find_base, load_adapter, save_adapter
from kedge.models.loading.gather import SHARD_SIZE, Reread, Stream, factors_of, gathered_model
from kedge.models.loading.hashing import folder_hash
from kedge.models.loading.load import DTypeName, dtype_for, load_causal, no_bars
from kedge.models.loading.resolve import resolve
from kedge.models.loading.unread import reader_of
from kedge.models.settings import BaseBits, LoraSettings, SaveDType, TrainingMemory

ENSEMBLE = "ensemble.json"
ADAPTER = "adapter"
"""The folder of an adapter by itself: beside a policy's model, and inside of a reward model's."""
_PLAIN = TrainingMemory()
START = "start"
"""The name of an adapter that is a part of the base."""


def start_causal(
    source: str,
    *,
    lora: LoraSettings | None,
    device: str,
    seed: int,
    keeps_dropout: bool = True,
    memory: TrainingMemory = _PLAIN,
    unread: bool = False,
) -> PreTrainedModel:
    """A model of which all weights are trainable, or, with `lora`, the adapters on a frozen base; in evaluation mode.

    Without `keeps_dropout` the model's own dropout is off; that of the adapters is in their settings. Trainable weights
    are float32, whatever type the forward pass computes in: in bfloat16 small updates would be rounded away. Those of a
    model that is left `unread` are read when it is sharded.
    """
    base = (
        load_base(source, dtype=memory.dtype, device=device, bits=lora.base_bits, unread=unread)
        if lora
        else load_causal(source, dtype="float32", device=device, unread=unread)
    )
    if not keeps_dropout:
        without_dropout(base)
    model = with_lora(base, lora, name="policy", seed=seed) if lora else base
    prepare_layers(model, compiled=memory.compiles_on(device), recomputes=memory.recompute)
    return model.eval()


def prepare_layers(model: PreTrainedModel, *, compiled: bool, recomputes: bool) -> None:
    """Compile the layers, and recompute their activations in the backward pass of a model in training mode."""
    if compiled:
        compile_layers(model)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def load_base(
    source: str, *, dtype: DTypeName = "auto", device: str = "cpu", bits: BaseBits = 16, unread: bool = False
) -> PreTrainedModel:
    """A causal model to put adapters on.

    Where `source` is a base with an adapter merged in, of which both are still there, and its weights would be rounded
    (to bfloat16, or to the bits of a quantised base), it is that base with the adapter as a part of it: rounding would
    take most of what was learnt away.
    """
    place = resolve(source)
    would_round = bits != 16 or dtype_for(dtype, device) != torch.float32
    base = unmerged_base(place) if would_round and isinstance(place, Path) else None
    if base is None:
        return load_causal(source, dtype=dtype, device=device, bits=bits, unread=unread)
    loaded = load_causal(base, dtype=dtype, device=device, bits=bits, unread=unread)
    return with_start(loaded, cast(Path, place).with_name(ADAPTER))


def unmerged_base(folder: Path) -> Path | None:
    """The base of the model in `folder` if it was made by merging the adapter beside it; None where one has changed."""
    beside = folder.with_name(ADAPTER)
    if not (beside / BASE).is_file():
        return None
    try:
        record: dict[str, str] = json.loads((beside / BASE).read_text(encoding="utf-8"))
        if "hash" not in record or record.get("merged") != folder_hash(folder):
            return None
        return Path(find_base(beside, record, None))
    except (OSError, ValueError, ModelError):
        return None


def with_start(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`base` with the adapter in `folder` as a frozen part of it."""
    load_adapter(base, folder, name=START)
    adapters = required_adapters(base)
    adapters.beneath = (START,)
    base.requires_grad_(False)
    return base


def without_dropout(model: nn.Module) -> None:
    """Turn dropout off for good: where log-probs are compared, two computations of them must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, LoraLinear):
            module.dropout = dict.fromkeys(module.dropout, 0.0)
        # Some modules have no layer for it but a number: `attention_dropout`, `residual_dropout`, `hidden_dropout`, …
        shares = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        for name in shares:
            setattr(module, name, 0.0)


def freeze_lowest(model: PreTrainedModel, count: int) -> None:
    """Freeze the embeddings and the lowest `count` transformer blocks; with 0, nothing is frozen."""
    if not count:
        return
    blocks = blocks_of(model)
    if count >= len(blocks):
        raise ModelError(
            f"frozen_layers is {count}, but {model.name_or_path} has {len(blocks)} transformer blocks and one at least "
            f"must learn; use 0 to {len(blocks) - 1}"
        )
    decoder = cast(nn.Module, model.get_decoder())
    embeddings = [child for child in decoder.children() if isinstance(child, nn.Embedding)]
    for module in (*embeddings, *blocks[:count]):
        module.requires_grad_(False)


def save_causal(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    dtype: SaveDType = "float32",
    world: World = ALONE,
) -> Path:
    """Save a whole model in the Hugging Face layout, adapters merged in; `folder` appears when it is complete.

    The adapter that is active is also saved by itself, in `adapter` beside `folder`. `weights` are the float32 masters
    of trained weights by the names of their parameters; without, the model's own are saved. The processes of `world`
    call it together, and the first one writes.
    """

    def write_by_weight(processes: World) -> Path:
        reread = reader_of_base(model, weights)
        whole = gathered_model(model, world=processes, weights=weights, dtype=save_type(dtype), reread=reread)

        def write(stream: Stream) -> Path:
            return _write_causal(model, tokenizer, folder, partial(whole.write_into, stream=stream), whole.factors)

        return whole.save(write)

    def write_whole() -> Path:
        if merges_by_weight(model, weights):
            return write_by_weight(ALONE)
        plain = plain_model(model, weights=weights, dtype=dtype)
        save = partial(plain.save_pretrained, max_shard_size=SHARD_SIZE)
        return _write_causal(model, tokenizer, folder, save, weights)

    return write_by_weight(world) if is_sharded(model) else once(world, write_whole)


def _write_causal(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    write: Callable[[Path], Any],
    weights: Mapping[str, Tensor] | None,
) -> Path:
    """The model that `write` puts into a folder, and the adapter that is active."""
    with whole_folder(folder) as beside, no_bars():
        write(beside)
        tokenizer.save_pretrained(beside)
    adapters = adapters_of(model)
    if adapters is not None and adapters.active:
        with whole_folder(folder.with_name(ADAPTER)) as beside:
            save_adapter(model, beside, name=adapters.active[-1], weights=weights)
            record = base_record(str(model.name_or_path), folder.with_name(ADAPTER))
            write_json(beside / BASE, {**record, "merged": folder_hash(folder)})
    return folder


def rounded_away(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> float | None:
    """The share of the entries that training has changed which bfloat16 gives the value that they began with.

    Of adapters, the beginning is the base in memory; of whole models, the files that they were read from. None where
    that is unknown, or nothing was trained.
    """
    pairs = _adapted_pairs if has_adapters(model) else _full_pairs
    changed = lost = 0
    for start, end in pairs(model, weights or {}):  # of a sharded model, all processes gather them
        has_changed = start.float() != end.float()
        changed += int(has_changed.sum())
        lost += int((has_changed & (start.to(torch.bfloat16) == end.to(torch.bfloat16))).sum())
    return lost / changed if changed else None


def _adapted_pairs(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Every adapted matrix without and with the adapter."""
    adapters = required_adapters(model)
    factors = factors_of(model, weights) if is_sharded(model) else weights
    for path, layer in adapters.layers.items():
        base = gathered(layer.weight)
        yield layer.merged((), base=base), layer.merged(adapters.active, factors, path=path, base=base)


def _full_pairs(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Every trained weight as it is in the files that the model was read from, and as it is now."""
    for file in sorted(Path(str(model.name_or_path)).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name in weights:
                    yield tensors.get_tensor(name), gathered(weights[name]).detach().cpu()


def plain_model(model: PreTrainedModel, *, weights: Mapping[str, Tensor] | None, dtype: SaveDType) -> PreTrainedModel:
    """The model as it is saved: the active adapter merged in float32, then all of it in `dtype`.

    A model that is so already is given as it is; any other is copied to the CPU.
    """
    kind = save_type(dtype)
    if is_rounded(model, weights) and model.name_or_path:
        # Frozen weights that 16, 8 or 4 bits have rounded are read again.
        base = load_causal(str(model.name_or_path), dtype="float32")
        return merge_anew(model, base, weights=weights, dtype=kind)
    is_same = all(
        parameter.dtype == kind and (weights or {}).get(key, parameter).data_ptr() == parameter.data_ptr()
        for key, parameter in model.named_parameters()
    )
    if adapters_of(model) is None and is_same:
        return model
    return merge(model, weights=weights, dtype=kind, device="cpu")


def save_type(dtype: SaveDType) -> torch.dtype:
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def reader_of_base(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> Reread | None:
    """What reads frozen weights again that are in 16 bits or fewer in memory, one by one; None where none are."""
    if not (is_rounded(model, weights) and model.name_or_path):
        return None
    return reader_of(lambda: load_causal(str(model.name_or_path), dtype="float32", unread=True))


def merges_by_weight(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> bool:
    """Whether one matrix after the other can be merged with its adapter and written, so that only one is there twice;
    a base that was rounded in memory is read again as a whole instead."""
    return adapters_of(model) is not None and not is_rounded(model, weights)


def is_rounded(model: PreTrainedModel, weights: Mapping[str, Tensor] | None) -> bool:
    """Whether weights beside the trained ones, `weights`, are in 16 bits or fewer in memory: their files may have more.

    Without `weights` it is not known which of them are as in the files.
    """
    if is_quantised(model):
        return True
    parameters = model.named_parameters()
    return weights is not None and any(
        weight.dtype.itemsize < 4 and name not in weights and ".lora_" not in name for name, weight in parameters
    )


@contextmanager
def shared_folder(world: World, folder: Path) -> Generator[Path]:
    """As `whole_folder`, of a folder that all processes write into: it appears when they are all done."""
    with ExitStack() as own:
        yield once(world, lambda: own.enter_context(whole_folder(folder)))
        world.same(None)  # all have written
        once(world, own.pop_all().close)


@contextmanager
def whole_folder(folder: Path, *, replaces: Sequence[str] = ("config.json", ENSEMBLE, CONFIG)) -> Generator[Path]:
    """A partial folder to write into, which replaces `folder` at the end and is deleted on an error.

    A reader never sees half a model. Only a model may be replaced, known by one of the files `replaces`: a folder with
    anything else in it is refused.
    """
    if folder.exists() and not any((folder / name).is_file() for name in replaces):
        raise ModelError(f"{folder} exists and holds no model, so it is not replaced; give another folder")
    partial, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    for left_by_a_kill in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    try:
        with run_errors("write", folder):
            partial.mkdir(parents=True)
            yield partial
            for path in partial.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    fsync_folder(folder.parent)
