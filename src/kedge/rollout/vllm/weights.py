"""The weights of a policy as vLLM reads them, and the proof that they arrived: a text that both sides score.

Shape letters: B rows, T token positions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kedge.core.errors import SyncError
from kedge.core.files import run_errors
from kedge.models.forward import heads
from kedge.models.forward.merging import merge

_FILE: Final = "model.safetensors"
_HEAD: Final = "lm_head.weight"
_LOOK_AT: Final = (
    "Look at the servers' logs for weights that were not loaded, at the versions and the dtype of both sides, and, for "
    "servers that were started by hand, at their --logprobs-mode (docs/vllm.md). Nothing was learnt from their answers"
)
PROBE_TOKENS: Final = 64


@torch.no_grad()
def weights_of(model: PreTrainedModel, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of the policy on the CPU, in the type that it computes in, under the names of its files.

    Adapters are merged, in float32, and rounded once. `trained` are the float32 masters of what learns. The head has an
    entry of its own where it is tied to the embeddings too: vLLM keeps the old one of a model that is sent without.
    """
    plain = merge(model, weights=trained, dtype=model.dtype, device="cpu")
    weights = dict(plain.state_dict())
    weights.setdefault(_HEAD, heads.lm_head(plain))
    weights = revert_weight_conversion(plain, weights)  # GPT-NeoX's head, say, has another name in the files
    owners: dict[int, str] = {}
    for name, weight in weights.items():
        is_shared = owners.setdefault(weight.data_ptr(), name) != name
        weights[name] = weight.detach().clone() if is_shared else weight.detach().contiguous()
    return weights


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """One file in `folder`, which is there when it is complete."""
    with run_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{_FILE}.partial"
        save_file(dict(weights), partial, metadata={"format": "pt"})
        os.replace(partial, folder / _FILE)


def remove_weights(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def probe_tokens(text: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The text that both sides score: some of the run's data, or tokens from all over the vocabulary."""
    tokens = tuple(text)[:PROBE_TOKENS]
    return tokens if len(tokens) > 1 else tuple((31 * at + 7) % vocabulary for at in range(24))


def score(model: PreTrainedModel, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each token but the first, as the trainer computes it, at temperature 1."""
    return scores_by(heads.language_model(model), tokens)


@torch.no_grad()
def scores_by(language_model: heads.LanguageModel, tokens: Sequence[int]) -> list[float]:
    """As `score`, by a model that is prepared to be asked again."""
    tokens_BT = torch.tensor([list(tokens)])
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    with language_model.active():
        return language_model.logprobs(tokens_BT, mask_BT, mask_BT)[0, 1:].tolist()


def gap_of(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How far the scores of a text are apart, in nats a token."""
    return sum(abs(own - other) for own, other in zip(ours, theirs, strict=True)) / len(ours)


def refuse_other_weights(
    ours: Sequence[float], theirs: Sequence[float], *, limit: float, url: str, what: str = "the weights"
) -> None:
    """A SyncError where the scores of the probe say that a server has other weights than the trainer."""
    gap = gap_of(ours, theirs)
    if not gap <= limit:
        raise SyncError(
            f"{what} did not arrive at {url}: the same text scores {gap:.3g} nats a token apart on server and "
            f"trainer, and generator.mismatch allows {limit:g}. {_LOOK_AT}"
        )
