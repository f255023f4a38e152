"""The reference's log-probs of answers, computed once: kept in the run's folder, and in the cache for other runs.

They are known by the content of the reference's weights and of the tokens. What is read is checked; what is damaged is
computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kedge.core.errors import CheckpointError
from kedge.core.files import atomic_open, hash_bytes, hash_json
from kedge.data.batching import LabelledAnswers, TokenSequence, answer_batches
from kedge.models.loading.cache import cache_root
from kedge.models.loading.hashing import module_hash
from kedge.models.training.preference_objectives import Reference, answer_logprobs
from kedge.stages.shared.chunks import token_chunks
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME: Final = "reference.safetensors"
ROW_TOKENS: Final = 8192
"""Tokens of one forward pass. Fixed, so that the numbers depend on nothing but what the key names."""
_FORMAT: Final = "1"


def reference_logprobs(
    context: Context,
    reference: Reference,
    sequences: Sequence[TokenSequence],
    *,
    file: Path,
    pad: int,
    has_adapters: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> list[float]:
    """The sum of log-probs of each answer under the model that `reference` opens, computed in `autocast`.

    They are kept in `file`. With `has_adapters`, adapters on the model are a part of it; else they are switched off
    and do not count.
    """
    with torch.no_grad(), reference() as model, autocast():
        key = _key(model, sequences, has_adapters=has_adapters)
        shared = cache_root() / "reference-logprobs" / f"{hash_json(key)}.safetensors"
        _refuse_another_reference(file, key)
        logp_S = _read(context, file, key, len(sequences))
        if logp_S is None:
            logp_S = _read(context, shared, key, len(sequences))
            if logp_S is None:
                logp_S = _compute(model, sequences, pad)
                _write(shared, logp_S, key)
            _write(file, logp_S, key)
    return logp_S.tolist()


def tokens_hash(sequences: Sequence[TokenSequence]) -> str:
    digest = blake2b(digest_size=16)
    for sequence in sequences:
        digest.update(len(sequence.tokens).to_bytes(8, "big"))
        digest.update(np.asarray(sequence.tokens, dtype=np.int64).tobytes())
        digest.update(np.asarray(sequence.counted, dtype=np.bool_).tobytes())
    return digest.hexdigest()


def _key(reference: PreTrainedModel, sequences: Sequence[TokenSequence], *, has_adapters: bool) -> dict[str, str]:
    kind = reference.device.type
    is_mixed = torch.is_autocast_enabled(kind)
    return {
        "format": _FORMAT,
        "weights": module_hash(reference, with_adapters=has_adapters),
        "tokens": tokens_hash(sequences),
        "computed": f"{kind} {torch.get_autocast_dtype(kind) if is_mixed else reference.dtype}",
    }


def _compute(reference: PreTrainedModel, sequences: Sequence[TokenSequence], pad: int) -> Tensor:
    logp_S = torch.zeros(len(sequences))
    for rows in token_chunks([len(sequence.tokens) for sequence in sequences], max_tokens=ROW_TOKENS):
        # Already longest first, so the batch keeps their order.
        items = [LabelledAnswers(sequences=(sequences[row],), is_good=(True,), ref_logp=(0.0,)) for row in rows]
        (batch,) = answer_batches(items, rows=len(rows), pad=pad, width=None)
        logp_S[torch.tensor(rows)] = answer_logprobs(reference, batch.to(reference.device)).float().cpu()
    return logp_S


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
