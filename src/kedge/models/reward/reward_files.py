"""Reward models built from causal language models, saved to folders and loaded from them.

A saved reward model is a sequence-classification model in the Hugging Face layout: plain transformers loads it and
gives the same raw scores. It reads them at the last token that is not padding, so the pad token of a reward model is
never one that ends a text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from kedge.core.errors import ModelError
from kedge.core.files import write_json
from kedge.core.world import ALONE, World, once
from kedge.models.forward.lora import adapters_of, using
from kedge.models.forward.merging import merge, merge_anew
from kedge.models.forward.sharding import is_sharded, real_device
from kedge.models.loading.adapters import BASE, base_record, save_adapter
from kedge.models.loading.gather import SHARD_SIZE, GatheredModel, Stream, gathered_model
from kedge.models.loading.load import DTypeName, dtype_for, explain, no_bars, quantisation, without_class
from kedge.models.loading.resolve import resolve
from kedge.models.loading.start import ADAPTER, ENSEMBLE, is_rounded, merges_by_weight, save_type, whole_folder
from kedge.models.loading.unread import reader_of, without_weights
from kedge.models.reward.reward_model import RewardModel, facts_from, head_of, start_head, unnormalised
from kedge.models.settings import BaseBits, SaveDType

FACTS = "kedge_reward.json"
_HEAD = "score.weight"


def build(
    source: str | Path,
    *,
    objectives: Sequence[str] = ("reward",),
    seed: int,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    bits: BaseBits = 16,
    trust_remote_code: bool = False,
    unread: bool = False,
) -> RewardModel:
    """A reward model with the backbone of a causal language model and a new float32 head, initialised from the seed.

    A backbone that is left `unread` has no weights yet: each process reads its part of them when it is sharded.
    """
    place = _absolute(resolve(source))
    config = _config(place, trust_remote_code)
    if _is_classifier(config):
        raise ModelError(f"{place} is a reward model already ({_architecture(config)}); load it to train it further")
    facts = unnormalised(objectives)
    tokenizer = tokenizer_of(place)
    pad = padding_token(
        tokenizer, edge_ids=_edge_ids(tokenizer, config), vocab_size=config.get_text_config().vocab_size
    )
    tokenizer.pad_token = pad
    tokenizer.padding_side = "right"
    model, missing = _load_classifier(
        place,
        dtype=dtype,
        device=device,
        unread=unread and bits == 16,
        trust_remote_code=trust_remote_code,
        # Set before the model is created, so that the embedding of the pad token gets no gradient.
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(objectives)),
        label2id={name: index for index, name in enumerate(objectives)},
        **quantisation(bits, device),
    )
    head = head_of(model)
    if absent := sorted(missing - {_HEAD}):
        raise ModelError(
            f"{place}: {len(absent)} weight(s) of the backbone are not in the files (first: '{absent[0]}')"
        )
    start_head(head, seed=seed)
    return RewardModel(model=model, tokenizer=tokenizer, facts=facts)


def save(
    reward: RewardModel,
    folder: Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    dtype: SaveDType = "float32",
    world: World = ALONE,
) -> None:
    """Save to `folder`, replacing a model that was there.

    An adapter is merged into its base, so that the folder is a model like any other, and saved in `adapter/` as well,
    for those who have the base in memory already. `weights` are the float32 masters of trained weights by the names of
    their parameters; without, the model's own are saved. The score head is float32 always. The processes of `world`
    call it together, and the first one writes.
    """
    adapters = adapters_of(reward.model)
    name = (reward.adapter or adapters.active[-1]) if adapters else None

    def write_by_weight(processes: World) -> None:
        whole = _gathered(reward, name, weights, dtype, processes)

        def write(stream: Stream) -> None:
            _write(reward, name, folder, lambda beside: whole.write_into(beside, stream), whole.factors)

        whole.save(write)

    if is_sharded(reward.model):
        write_by_weight(world)
        return

    def write_whole() -> None:
        if merges_by_weight(reward.model, weights):
            write_by_weight(ALONE)
            return
        plain = _plain(reward, name, weights, dtype)
        _describe(plain, reward)
        _write(reward, name, folder, lambda beside: plain.save_pretrained(beside, max_shard_size=SHARD_SIZE), weights)

    once(world, write_whole)


def _describe(plain: PreTrainedModel, reward: RewardModel) -> None:
    config: Any = plain.config
    config.kedge_reward = reward.facts.as_dict()


def _write(
    reward: RewardModel,
    name: str | None,
    folder: Path,
    write: Callable[[Path], Any],
    weights: Mapping[str, torch.Tensor] | None,
) -> None:
    """The model that `write` puts into a folder, and its adapter `name`."""
    with whole_folder(folder) as beside, no_bars():
        write(beside)
        reward.tokenizer.save_pretrained(beside)
        if name:
            save_adapter(reward.model, beside / ADAPTER, name=name, weights=weights)
            write_json(beside / ADAPTER / FACTS, reward.facts.as_dict())
            base = str(reward.model.name_or_path)
            write_json(beside / ADAPTER / BASE, base_record(base, folder / ADAPTER))


def _gathered(
    reward: RewardModel,
    name: str | None,
    weights: Mapping[str, torch.Tensor] | None,
    dtype: SaveDType,
    world: World,
) -> GatheredModel:
    """A model as it is saved, weight by weight."""
    model, source = reward.model, str(reward.model.name_or_path)
    reread = None
    if is_rounded(model, weights) and source:
        reread = reader_of(
            lambda: build(source, objectives=reward.objectives, seed=0, dtype="float32", unread=True).model
        )
    whole = gathered_model(model, world=world, weights=weights, dtype=save_type(dtype), name=name, reread=reread)
    _describe(whole.plain, reward)
    head = head_of(whole.plain)
    head.weight = nn.Parameter(head.weight.detach().float(), requires_grad=False)
    return whole


def load(
    source: str | Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    bits: BaseBits = 16,
    trust_remote_code: bool = False,
    unread: bool = False,
) -> RewardModel:
    """A saved reward model, or anybody's sequence-classification model; the head is float32, as it was saved.

    `bits` are those of a weight below the head. One that is left `unread` has no other weights yet: each process reads
    its part of them when it is sharded.
    """
    if (Path(source) / ENSEMBLE).is_file():
        raise ModelError(f"{source} is an ensemble of reward models; load it with load_reward")
    place = _absolute(resolve(source))
    config = _config(place, trust_remote_code)
    if not _is_classifier(config):
        raise ModelError(
            f"{place} is not a reward model but a {_architecture(config)}: it has no score head. Train one from it "
            "with a stage of kind reward"
        )
    model, missing = _load_classifier(
        place,
        dtype=dtype,
        device=device,
        unread=unread and bits == 16,
        trust_remote_code=trust_remote_code,
        **quantisation(bits, device),
    )
    head = head_of(model)
    if missing:
        raise ModelError(
            f"{place}: {len(missing)} weight(s) are not in the files (first: '{min(missing)}') and would start as "
            "random numbers; the folder is damaged, or was never a trained reward model"
        )
    weight = _saved_head(place) if isinstance(place, Path) else head.weight.detach()
    head.weight = nn.Parameter(weight.float().to(real_device(head.weight)))
    stored = getattr(config, "kedge_reward", None)
    labels = [config.id2label[index] for index in range(head.out_features)]
    facts = facts_from(stored) if stored else unnormalised(["reward"] if labels == ["LABEL_0"] else labels)
    return RewardModel(model=model, tokenizer=tokenizer_of(place), facts=facts)


def tokenizer_of(place: Path | str) -> PreTrainedTokenizerBase:
    # AutoTokenizer rebuilds the pre-tokenizer of some families and ignores the one in tokenizer.json.
    has_own = not isinstance(place, Path) or (place / "tokenizer.json").is_file()
    loader: Any = PreTrainedTokenizerFast if has_own else AutoTokenizer
    try:
        return loader.from_pretrained(place)
    except Exception as error:  # the tokenizers library raises plain `Exception` for a damaged file
        raise ModelError(f"the tokenizer of '{place}' cannot be loaded: {' '.join(str(error).split())}") from error


def padding_token(tokenizer: PreTrainedTokenizerBase, *, edge_ids: Collection[int], vocab_size: int) -> str:
    """A control token that never begins or ends a text: the tokenizer's own pad token if it is one, else another.

    SmolLM2 pads with its end-of-turn token, with which plain transformers would read the score one token too early.
    """
    template = str(tokenizer.chat_template or "")
    control = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = [i for i, text in control.items() if i not in edge_ids and i < vocab_size and text not in template]
    if not free:
        raise ModelError(
            f"the tokenizer pads with '{tokenizer.pad_token}', which also ends a text, and has no other control token; "
            "add a pad token of its own to the tokenizer and the model"
        )
    penalties = {
        i: (
            i != tokenizer.pad_token_id,
            "pad" not in text.lower(),
            text != "<|endoftext|>",
            i == tokenizer.unk_token_id,
        )
        for i, text in control.items()
    }
    return control[min(free, key=lambda i: (penalties[i], i))]


def _plain(
    reward: RewardModel, name: str | None, weights: Mapping[str, torch.Tensor] | None, dtype: SaveDType
) -> PreTrainedModel:
    """The model as it is saved, its adapter merged in."""
    model, kind = reward.model, save_type(dtype)
    if is_rounded(model, weights) and model.name_or_path:
        # Frozen weights that 16, 8 or 4 bits have rounded are read again.
        exact = build(str(model.name_or_path), objectives=reward.objectives, seed=0, dtype="float32")
        plain = merge_anew(model, exact.model, name=name, weights=weights, dtype=kind)
    else:
        plain = merge(model, name=name, weights=weights, dtype=kind, device="cpu")
    with using(model, name) if name else nullcontext():
        head = head_of(model).weight
    keys = {id(parameter): key for key, parameter in model.named_parameters()}
    precise = (weights or {}).get(keys[id(head)], head)
    head_of(plain).weight = nn.Parameter(precise.detach().float().cpu(), requires_grad=False)
    return plain


def _load_classifier(
    place: Path | str, *, dtype: DTypeName, device: str | torch.device, unread: bool, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """The model in evaluation mode, and the names of the weights that were not in the files."""
    loader: Any = AutoModelForSequenceClassification
    try:
        if unread:
            return _unread_classifier(place, dtype_for(dtype, device), options)
        # transformers initialises a missing head from the global generator, which is restored; callers refuse such a
        # head or replace it.
        with _quiet(), torch.random.fork_rng(devices=[]):
            model, report = loader.from_pretrained(
                place, dtype=dtype_for(dtype, device), use_safetensors=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        text = (
            "transformers has no such class for it; train the reward model from another (Llama, Qwen, Mistral, …)"
            if without_class(error)
            else " ".join(str(error).split())
        )
        raise ModelError(f"{place}: cannot be loaded as a sequence-classification model: {text}") from error
    placed = model if "device_map" in options else model.to(device)
    return placed.eval(), set(report["missing_keys"])


def _unread_classifier(
    place: Path | str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[PreTrainedModel, set[str]]:
    def read() -> PreTrainedModel:
        name = cast(DTypeName, str(dtype).removeprefix("torch."))
        model, missing = _load_classifier(place, dtype=name, device="cpu", unread=False, **options)
        if absent := sorted(missing - {_HEAD}):
            raise ModelError(f"{place}: {len(absent)} weight(s) are not in the files (first: '{absent[0]}')")
        return model

    return without_weights(
        AutoModelForSequenceClassification,
        place,
        AutoConfig.from_pretrained(place, **options),
        dtype=dtype,
        read=read,
        trust_remote_code=options["trust_remote_code"],
    )


@contextmanager
def _quiet() -> Generator[None]:
    """No progress bars, and no table of missing weights: the caller knows which ones are new."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(level)


def _config(place: Path | str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        text = f"{place}: its config.json cannot be used: {' '.join(str(error).split())}"
        raise ModelError(text if isinstance(place, Path) else explain(place, error)) from error


def _absolute(place: Path | str) -> Path | str:
    return place.absolute() if isinstance(place, Path) else place


def _architecture(config: Any) -> str:
    return next(iter(config.architectures or ()), f"model of type {config.model_type}")


def _is_classifier(config: Any) -> bool:
    return _architecture(config).endswith("ForSequenceClassification")


def _edge_ids(tokenizer: PreTrainedTokenizerBase, config: Any) -> set[int]:
    named = config.get_text_config().eos_token_id
    listed = named if isinstance(named, list) else [named]
    return {i for i in (tokenizer.eos_token_id, tokenizer.bos_token_id, *listed) if isinstance(i, int)}


def _saved_head(folder: Path) -> torch.Tensor:
    """The head as it is in the files: loading a model in bfloat16 would round it."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if _HEAD in file.keys():  # noqa: SIM118 (not a mapping)
                return file.get_tensor(_HEAD)
    raise ModelError(f"{folder}: no weight named '{_HEAD}' in its safetensors files")
