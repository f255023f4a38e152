"""A reward model: the backbone of a language model, a linear head without bias, and what its scores mean.

The score of a text is read at its last real token by the attention mask, whatever the padding is. Building, saving and
loading are in `reward_files`, ensembles of several models in `ensemble`.
Shape letters: B sequences, T token positions, D width, K objectives, N demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.core.errors import DataError, ModelError, NumericsError, ShapeError
from kedge.core.loss import widen
from kedge.models.forward.backbones import Backbone, backbone_of
from kedge.models.forward.heads import last_token
from kedge.models.forward.lora import ScoreHeads, activate
from kedge.models.forward.reader import compile_layers, evaluating
from kedge.models.forward.sharding import fill_of, real_device
from kedge.models.loading.start import without_dropout
from kedge.models.settings import Truncate

_STORED = {"objectives", "mean", "std", "template_hash", "max_length", "truncate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """(score - mean) / std for each objective, so that demonstrations average 0 with variance 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        is_sound = all(map(math.isfinite, self.mean)) and all(0 < std < math.inf for std in self.std)
        if len(self.mean) != len(self.std) or not is_sound:
            raise NumericsError(f"a normaliser needs finite means and positive stds, found {self.mean} and {self.std}")

    def __call__(self, scores_BK: Tensor) -> Tensor:
        """
        >>> Normaliser(mean=(1.0, -2.0), std=(2.0, 0.5))(torch.tensor([[5.0, -1.0]])).tolist()
        [[2.0, 2.0]]
        """
        return (scores_BK - scores_BK.new_tensor(self.mean)) / scores_BK.new_tensor(self.std)


def fit_normaliser(scores_NK: Tensor) -> Normaliser:
    """The moments of raw scores of demonstrations; the variance is that of the population.

    >>> fit_normaliser(torch.tensor([[1.0, 2.0], [5.0, 3.0]]))
    Normaliser(mean=(3.0, 2.5), std=(2.0, 0.5))
    """
    scores_NK = scores_NK.double()
    std_K = scores_NK.std(dim=0, correction=0)
    if not torch.isfinite(scores_NK).all() or not (std_K > 0).all():
        raise NumericsError(
            f"scores of {len(scores_NK)} demonstrations cannot be normalised: each objective needs finite scores that "
            f"differ, found means {scores_NK.mean(dim=0).tolist()} and stds {std_K.tolist()}"
        )
    return Normaliser(mean=tuple(scores_NK.mean(dim=0).tolist()), std=tuple(std_K.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """What the scores of a model mean: saved in its `config.json` under `kedge_reward`."""

    objectives: tuple[str, ...]
    """What each of the K scores is about (`helpful`, `harmless`)."""
    normaliser: Normaliser
    template_hash: str = ""
    """Identity of the chat template that the model was trained on; empty where it is unknown."""
    max_length: int | None = None
    """Longest text in tokens that the model was trained on."""
    truncate: Truncate = "left"
    """What was done to longer ones."""
    score_ranges: tuple[tuple[float, float], ...] = ()
    """The lowest and the highest normalised score of its training answers, for each objective; empty if unknown."""

    def __post_init__(self) -> None:
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise ModelError(f"objectives: expected one or more different names, found {list(self.objectives)}")
        if len(self.normaliser.mean) != len(self.objectives):
            raise ModelError(f"objectives {list(self.objectives)} do not fit the means {list(self.normaliser.mean)}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "objectives": list(self.objectives),
            "mean": list(self.normaliser.mean),
            "std": list(self.normaliser.std),
            "template_hash": self.template_hash,
            "max_length": self.max_length,
            "truncate": self.truncate,
            "seen": [list(bounds) for bounds in self.score_ranges],
        }


def facts_from(stored: Mapping[str, Any]) -> RewardFacts:
    """The inverse of `as_dict`."""
    if missing := _STORED - stored.keys():
        raise ModelError(f"kedge_reward: {', '.join(sorted(missing))} missing; only {', '.join(sorted(stored))} found")
    return RewardFacts(
        objectives=tuple(stored["objectives"]),
        normaliser=Normaliser(mean=tuple(stored["mean"]), std=tuple(stored["std"])),
        template_hash=stored["template_hash"],
        max_length=stored["max_length"],
        truncate=stored["truncate"],
        score_ranges=tuple((low, high) for low, high in stored.get("seen", ())),
    )


def unnormalised(objectives: Sequence[str]) -> RewardFacts:
    """The facts of a model whose raw scores are used as they are."""
    neutral = Normaliser(mean=(0.0,) * len(objectives), std=(1.0,) * len(objectives))
    return RewardFacts(objectives=tuple(objectives), normaliser=neutral)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Weights, tokenizer and facts. With `adapter`, it is that adapter on a model that several members share.

    One whose weights are not read yet has no backbone: `replace` makes one for it when they are.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: RewardFacts
    adapter: str | None = None
    backbone: Backbone = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if fill_of(self.model) is None:
            object.__setattr__(self, "backbone", backbone_of(self.model, self.adapter))

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.facts.objectives

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_BK` in float32, without gradient or dropout; raw scores are those that plain transformers gives.

        It may be called in the middle of training: the active adapter, what is trainable and the mode are restored.
        """
        with evaluating(self.model), torch.no_grad(), self.backbone.active():
            scores_BK = scores(self, *right_padded(tokens_BT, attention_mask_BT))
        return self.facts.normaliser(scores_BK) if normalised else scores_BK

    def last_hidden(self, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        """`hidden_BD` in float32 at the last real token: what the head reads, without gradient or dropout."""
        with evaluating(self.model), torch.no_grad(), self.backbone.active():
            tokens_BT, mask_BT = right_padded(tokens_BT, attention_mask_BT)
            return widen(self.backbone.hidden(tokens_BT, mask_BT, last_token(mask_BT)))

    def activate(self) -> None:
        """Where several members share one base: make the adapter of this one active, and it alone trainable."""
        if self.adapter:
            activate(self.model, self.adapter)


def scores(member: RewardModel, tokens_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """`scores_BK`: raw scores with gradient, float32 at least whatever the weights; inside of `backbone.active`.

    One text a row, padded on the right; the mask is on the host.
    """
    last_BD = member.backbone.hidden(tokens_BT, attention_mask_BT, last_token(attention_mask_BT))
    return head_of(member.model)(widen(last_BD))


def right_padded(tokens_BT: Tensor, attention_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that begin at their first position, and their mask on the host; what is padded on the left is moved."""
    mask_BT = attention_mask_BT.cpu().bool()
    if tokens_BT.shape != mask_BT.shape or not mask_BT.any(dim=1).all():
        raise ShapeError(
            f"tokens_BT {tuple(tokens_BT.shape)} and attention_mask_BT {tuple(mask_BT.shape)} must have one shape, and "
            "every row a real token"
        )
    if not (~mask_BT[:, :-1] & mask_BT[:, 1:]).any():
        return tokens_BT, mask_BT
    order_BT = (~mask_BT).long().argsort(dim=1, stable=True)
    return tokens_BT.gather(1, order_BT.to(tokens_BT.device)), mask_BT.gather(1, order_BT)


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The score head; of a model with adapters, that of the active adapter."""
    head: Any = getattr(model, "score", None)
    if isinstance(head, ScoreHeads):
        head = head.current()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear layer named `score`; reward models are made from decoders "
            "whose sequence-classification class in transformers has one (Llama, Qwen, Gemma, Mistral, Phi, GPT-2, …)"
        )
    return head


@torch.no_grad()
def start_head(head: nn.Linear, *, seed: int) -> None:
    """float32 weights from N(0, 1 / (D + 1)): std 1 / sqrt(D + 1) (Stiennon et al. 2020, appendix B.1)."""
    shape, width = head.weight.shape, head.in_features
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width + 1)
    head.weight = nn.Parameter(weight.to(real_device(head.weight)))


def reward_tokens(
    tokens: Sequence[int],
    *,
    stop_ids: Collection[int],
    blank_ids: Collection[int] = (),
    max_length: int,
    truncate: Truncate = "left",
) -> list[int]:
    """The tokens of a rendered conversation for scoring: they end in an end-of-turn token, where the score is read.

    What a template writes after the last end of turn (ChatML: a newline) is dropped if it is in `blank_ids`. A text
    longer than `max_length` loses its beginning, or is refused; its end is never cut.

    >>> reward_tokens([1, 50, 51, 2, 9], stop_ids={2}, blank_ids={9}, max_length=3)
    [50, 51, 2]
    """
    end = len(tokens)
    while end and tokens[end - 1] in blank_ids:
        end -= 1
    text = list(tokens[:end])
    if not text or text[-1] not in stop_ids:
        raise DataError(
            f"a text to be scored must end in an end-of-turn token ({sorted(stop_ids)}); "
            f"this one of {len(tokens)} tokens ends in {list(tokens[-4:])}"
        )
    if len(text) > max_length and truncate == "refuse":
        raise DataError(
            f"a text of {len(text)} tokens is longer than the window of {max_length}; raise max_length, or set "
            "too_long: cut to score it without its beginning"
        )
    return text[-max_length:]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRole:
    """Gives the scores of a `RewardModel` from a backbone that may be shared with other roles."""

    backbone: Backbone
    head_KD: Tensor
    tokenizer: PreTrainedTokenizerBase
    facts: RewardFacts

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.facts.objectives

    @property
    def device(self) -> torch.device:
        return self.head_KD.device

    @torch.no_grad()
    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        """`scores_BK` in float32. One text a row."""
        tokens_BT, mask_BT = right_padded(tokens_BT, attention_mask_BT)
        with self.backbone.active():
            last_BD = self.backbone.hidden(tokens_BT, mask_BT, last_token(mask_BT))
        scores_BK = linear(widen(last_BD), self.head_KD)
        return self.facts.normaliser(scores_BK) if normalised else scores_BK


def reward_role(member: RewardModel, *, compiled: bool) -> RewardRole:
    """A reward model with weights of its own as a role: frozen, without dropout, its layers compiled if asked."""
    freeze(member, compiled=compiled)
    return role_of(member)


def freeze(member: RewardModel, *, compiled: bool) -> None:
    """Frozen for good, without dropout, layers compiled if asked."""
    member.activate()
    without_dropout(member.model.eval())
    member.model.requires_grad_(False)  # after `activate`, which makes an adapter trainable
    if compiled:
        compile_layers(member.model)


def role_of(member: RewardModel) -> RewardRole:
    """A reward model that is frozen as a role."""
    member.activate()
    head_KD = head_of(member.model).weight.detach().clone()
    member.model.requires_grad_(False)
    backbone = backbone_of(member.model, member.adapter)
    return RewardRole(backbone=backbone, head_KD=head_KD, tokenizer=member.tokenizer, facts=member.facts)
