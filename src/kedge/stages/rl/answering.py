"""Answers of a model to fixed prompts: for `kedge sample`, and for evaluations to compare.

An answer depends on the model, the prompt's place in the list, the answer's number, the settings and the seed, and on
no other row. Answers of a model in a folder are kept in the cache under a hash of all of it, and read from there the
next time; a model of the hub, whose weights may change behind its name, is asked again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kedge.core.files import hash_folder, hash_json, write_json
from kedge.core.records import Prompts, Rollouts, joined, repeated, to_device
from kedge.core.world import ALONE, World
from kedge.data.examples import Messages
from kedge.data.template import encode_prompt, stop_ids, template_hash
from kedge.data.tokenizer import padding_id
from kedge.models.loading.cache import build_once, cache_root
from kedge.models.loading.describe import context_window
from kedge.models.loading.load import DTypeName, dtype_for, load_causal
from kedge.models.loading.resolve import resolve
from kedge.models.settings import AutoSize
from kedge.rollout.local import LocalGenerator
from kedge.rollout.rows import rows_at_once
from kedge.rollout.settings import SamplingSettings
from kedge.rollout.shared import SharedGenerator
from kedge.stages.rl.reward import decoded, tokenizer_hash
from kedge.stages.shared.device import pick_device
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FORMAT = 1
_FILE = "rollouts.safetensors"
_ROUNDS = 8
"""So many times the rows that are sampled at once go to the generator together: few enough to report progress, and
enough to keep its rows full."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """A request for answers: of which model, and how many, sampled how. `rows` are sampled at once: it changes speed
    and memory, never an answer."""

    model: str
    sampling: SamplingSettings
    answers: int
    seed: int
    chat_template: str | None = None
    device: str = "auto"
    dtype: DTypeName = "auto"
    rows: AutoSize = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`rollouts` are on the CPU; group g is prompt g, and its answers are neighbours, in order."""

    rollouts: Rollouts
    tokenizer: PreTrainedTokenizerBase
    is_cached: bool

    def tokens(self) -> list[tuple[int, ...]]:
        """The answer of each row, without the token that ended it."""
        rollouts = self.rollouts
        rows = zip(rollouts.tokens_BT, rollouts.response_mask_BT, rollouts.finished_B.tolist(), strict=True)
        sampled = ((tokens_T[mask_T].tolist(), is_finished) for tokens_T, mask_T, is_finished in rows)
        return [tuple(tokens[:-1] if is_finished else tokens) for tokens, is_finished in sampled]

    def texts(self) -> list[str]:
        return [decoded(self.tokenizer, tokens) for tokens in self.tokens()]


def answer(
    request: Answering,
    prompts: Sequence[Messages],
    *,
    progress: Progress = lambda _: None,
    world: World = ALONE,
    load: Callable[[], PreTrainedModel] | None = None,
) -> Answered:
    """So many answers to each prompt, sampled or read from the cache. `progress` is called with their number so far.

    The processes of `world` share the rows; the cache is that of the first. `load` gives the model to whoever has it
    already.
    """
    tokenizer = tokenizer_for(request.model, request.chat_template)
    rows = repeated(
        [encode_prompt(tokenizer, prompt) for prompt in prompts], ids=range(len(prompts)), answers=request.answers
    )
    facts = _identity(request, tokenizer, rows)
    if facts is None:
        sampled = _sampled(request, tokenizer, rows, progress, world, load)
        return Answered(rollouts=sampled, tokenizer=tokenizer, is_cached=False)
    folder = cache_root() / "answers" / hash_json(facts)
    about = {**facts, "prompts": len(prompts), "model": request.model}
    cached = world.same(_read(folder, rows) if world.rank == 0 and folder.is_dir() else None)
    if cached is not None:
        return Answered(rollouts=cached, tokenizer=tokenizer, is_cached=True)
    sampled = _sampled(request, tokenizer, rows, progress, world, load)
    if world.rank == 0:
        build_once(folder, lambda beside: _write(beside, sampled, about))
    return Answered(rollouts=sampled, tokenizer=tokenizer, is_cached=False)


def room_for_answers(model: str, prompts: Sequence[Messages], *, chat_template: str | None) -> int:
    """Tokens that the window of a model leaves for an answer to the longest of these prompts."""
    tokenizer = tokenizer_for(model, chat_template)
    longest = max(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    return (context_window(model) or sys.maxsize) - longest


def _sampled(
    request: Answering,
    tokenizer: PreTrainedTokenizerBase,
    rows: Prompts,
    progress: Progress,
    world: World,
    load: Callable[[], PreTrainedModel] | None,
) -> Rollouts:
    device = pick_device(request.device)
    model = load() if load is not None else load_causal(request.model, dtype=request.dtype, device=device)
    return sample_answers(
        model,
        tokenizer,
        rows,
        request.sampling,
        seed=request.seed,
        at_once=request.rows,
        progress=progress,
        world=world,
    )


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Prompts,
    sampling: SamplingSettings,
    *,
    seed: int,
    at_once: AutoSize = "auto",
    progress: Progress = lambda _: None,
    world: World = ALONE,
) -> Rollouts:
    """An answer for every row, of a model that is at hand, on the CPU; its mode and attention are as before."""
    longest = max(map(len, rows.tokens)) + sampling.max_new_tokens
    max_rows = rows_at_once(model, at_once, longest=longest, total=-(-len(rows.tokens) // world.size))
    pad = padding_id(tokenizer)
    local = LocalGenerator(
        model,
        sampling,
        stop_ids=stop_ids(tokenizer),
        pad=pad,
        max_rows=max_rows,
        decode=partial(decoded, tokenizer),
    )
    generator = SharedGenerator(local, world, pad=pad, device=model.device)
    size = max_rows * _ROUNDS * world.size
    parts: list[Rollouts] = []
    for at in range(0, len(rows.tokens), size):
        parts.append(to_device(generator.generate(_part(rows, slice(at, at + size)), seed), "cpu"))
        progress(at + len(parts[-1].tokens_BT))
    return joined(parts)


def _part(rows: Prompts, part: slice) -> Prompts:
    return Prompts(tokens=rows.tokens[part], group=rows.group[part], answer=rows.answer[part])


def _identity(request: Answering, tokenizer: PreTrainedTokenizerBase, rows: Prompts) -> dict[str, Any] | None:
    """Everything that an answer depends on; None where the weights have no stable identity."""
    source = resolve(request.model)
    if not isinstance(source, Path):
        return None
    device = torch.device(pick_device(request.device))
    return {
        "format": _FORMAT,
        "weights": hash_folder(source, suffixes=(".safetensors", "config.json")),
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        "rows": hash_json([rows.tokens, rows.group, rows.answer]),
        "sampling": request.sampling.model_dump(mode="json"),
        "seed": request.seed,
        # Rounding differs between these, and now and then the token that is drawn.
        "device": device.type,
        "dtype": str(dtype_for(request.dtype, device)),
    }


def _write(folder: Path, rollouts: Rollouts, about: Mapping[str, Any]) -> None:
    """`about` is for people who look into the cache."""
    tensors = {
        "tokens_BT": rollouts.tokens_BT.to(torch.int32),
        "attention_mask_BT": rollouts.attention_mask_BT,
        "response_mask_BT": rollouts.response_mask_BT,
        "behaviour_logp_BT": rollouts.behaviour_logp_BT,
        "finished_B": rollouts.finished_B,
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _FILE)
    write_json(folder / "about.json", about)


def _read(folder: Path, rows: Prompts) -> Rollouts:
    tensors: dict[str, Tensor] = load_file(folder / _FILE)
    tokens_BT = tensors.pop("tokens_BT").to(torch.int64)
    return Rollouts(tokens_BT=tokens_BT, group_B=torch.tensor(rows.group), version=0, **tensors)
