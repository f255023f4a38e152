"""The reference's log-probs of answers, computed once: kept in the run's folder, and in the cache for other runs.

They are known by the content of the reference's weights and of the tokens. What is read is checked; what is damaged is
computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kedge.core.errors import CheckpointError
from kedge.core.files import atomic_open, hash_bytes, hash_json
from kedge.core.world import World
from kedge.data.batching import TokenSequence, token_batch
from kedge.models.forward.heads import LanguageModel
from kedge.models.forward.sharding import compute_dtype
from kedge.models.loading.cache import cache_root
from kedge.models.loading.hashing import module_hash
from kedge.models.training.passes import InferenceSize
from kedge.models.training.preference_objectives import Reference
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME: Final = "reference.safetensors"
_FORMAT: Final = "2"


def reference_logprobs(
    context: Context,
    reference: Reference,
    sequences: Sequence[TokenSequence],
    *,
    file: Path,
    pad: int,
    has_adapters: bool = False,
) -> list[float]:
    """The sum of log-probs of each answer under the model that `reference` opens.

    They are kept in `file`. With `has_adapters`, adapters on the model are a part of it; else they are switched off
    and do not count.
    """
    with torch.no_grad(), reference() as opened:
        key = _key(opened.model, sequences, has_adapters=has_adapters)
        shared = cache_root() / "reference-logprobs" / f"{hash_json(key)}.safetensors"
        kept = context.once(lambda: _take_over(context, file, shared, key, len(sequences)))
        if kept is not None:
            return kept.tolist()
        logp_S = _compute(opened.language_model, sequences, pad, context.world)
        for place in (shared, file):
            context.once(partial(_write, place, logp_S, key))
    return logp_S.tolist()


def _take_over(context: Context, own: Path, shared: Path, key: Mapping[str, str], count: int) -> Tensor | None:
    """The log-probs of the run's own file, else of the cache, which then are the run's own too."""
    _refuse_another_reference(own, key)
    logp_S = _read(context, own, key, count)
    if logp_S is None and (logp_S := _read(context, shared, key, count)) is not None:
        _write(own, logp_S, key)
    return logp_S


def tokens_hash(sequences: Sequence[TokenSequence]) -> str:
    digest = blake2b(digest_size=16)
    for sequence in sequences:
        digest.update(len(sequence.tokens).to_bytes(8, "big"))
        digest.update(np.asarray(sequence.tokens, dtype=np.int64).tobytes())
        digest.update(np.asarray(sequence.counted, dtype=np.bool_).tobytes())
    return digest.hexdigest()


def _key(reference: PreTrainedModel, sequences: Sequence[TokenSequence], *, has_adapters: bool) -> dict[str, str]:
    return {
        "format": _FORMAT,
        "weights": module_hash(reference, with_adapters=has_adapters),
        "tokens": tokens_hash(sequences),
        "computed": f"{reference.device.type} {compute_dtype(reference)}",
    }


def _compute(model: LanguageModel, sequences: Sequence[TokenSequence], pad: int, world: World) -> Tensor:
    def compute(rows: list[int]) -> Tensor:
        batch = token_batch([sequences[row] for row in rows], pad=pad)
        return model.logprobs(batch.tokens_BT, batch.attention_mask_BT, batch.counted_BT).sum(dim=1)

    lengths = [sequence.num_tokens for sequence in sequences]
    return InferenceSize(model.device, world=world).by_length(lengths, compute).float().cpu()


def _refuse_another_reference(own: Path, key: Mapping[str, str]) -> None:
    """A resumed run must go on with the reference and the data that it began with."""
    before = _facts(own) or {}
    changed = [name for name in ("weights", "tokens") if name in before and before[name] != key[name]]
    if changed:
        raise CheckpointError(
            f"{own}: these log-probs are of other {' and '.join(changed)} than the run has now; a resumed run must go "
            "on with the model and the data it began with: restore them, or start a new run"
        )


def _facts(place: Path) -> dict[str, str] | None:
    try:
        with safe_open(place, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return None


def _read(context: Context, place: Path, key: Mapping[str, str], count: int) -> Tensor | None:
    """The log-probs in a file; None where there is no file, and with a warning where it is damaged."""
    if not place.exists():
        return None
    try:
        with safe_open(place, framework="pt") as file:
            facts, logp_S = dict(file.metadata() or {}), file.get_tensor("logp_S")
    except (OSError, SafetensorError) as error:
        reason = str(error)
    else:
        if facts == {**key, "content": _content(logp_S)} and logp_S.shape == (count,):
            return logp_S
        reason = "its content is not what it says"
    message = f"{place} cannot be used ({reason}): the reference is asked again"
    context.event("warning", "preference.reference_damaged", message)
    return None


def _write(place: Path, logp_S: Tensor, key: Mapping[str, str]) -> None:
    facts = {**key, "content": _content(logp_S)}
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_open(place) as file:
        file.write(save({"logp_S": logp_S}, metadata=facts))


def _content(logp_S: Tensor) -> str:
    return hash_bytes(logp_S.numpy().tobytes())
