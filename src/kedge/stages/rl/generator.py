"""The generator of an RL run: made from its policy and its prompts, and held to the weights that learn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kedge.core.errors import MisledError
from kedge.core.protocols import Generator, Metrics
from kedge.core.world import acting_alone
from kedge.data.template import stop_ids
from kedge.data.tokenizer import padding_id
from kedge.models.forward.sharding import whole_copy
from kedge.rollout.generators import GeneratorParts, open_generator
from kedge.rollout.rows import rows_at_once
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.reward import decoded
from kedge.stages.rl.settings import RLSettings
from kedge.stages.shared.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kedge.core.findings import Level

_PROBED = 8
"""Prompts among which the text is chosen by which weights are compared."""


def make_generator(
    context: Context,
    settings: RLSettings,
    sampling: SamplingSettings,
    *,
    policy: PreTrainedModel,
    prompts: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> Generator:
    """The generator that the recipe names, sampling from this policy."""
    policy = whole_copy(policy)
    longest = max(map(len, prompts.tokens)) + sampling.max_new_tokens
    parts = GeneratorParts(
        model=policy,
        sampling=sampling,
        stop_ids=stop_ids(tokenizer),
        pad=padding_id(tokenizer),
        max_rows=rows_at_once(
            policy,
            settings.memory.generate_rows,
            longest=longest,
            total=-(-settings.batch * settings.answers // context.world.size),
        ),
        decode=partial(decoded, tokenizer),
        source=context.input("from"),
        folder=context.folder,
        longest=longest,
        probe=max((prompts.tokens[item] for item in range(min(_PROBED, len(prompts.tokens)))), key=len),
        report=partial(_report, context),
        world=context.world,
    )
    return open_generator(settings.generator, parts)


def _report(context: Context, level: Level, code: str, message: str, **evidence: Any) -> None:
    """An event of this process alone: the others do not know what its servers do."""
    with acting_alone():
        context.event(level, code, message, **evidence)


def refuse_other_weights(metrics: Metrics, limit: float) -> None:
    """Stop where answers of the policy's own weights have other log-probs than it gives them itself: the weights did
    not arrive at the generator. Of answers of older weights no mismatch is measured."""
    mismatch = metrics.get("policy/mismatch")
    if mismatch is None or mismatch <= limit:
        return
    raise MisledError(
        f"policy/mismatch is {mismatch:.3g} nats a token between generator and trainer with the same weights, and "
        f"generator.mismatch allows {limit:g}: the weights did not arrive, or the two do not compute alike. Look at "
        "the log of the generator for weights that were not loaded, at the precision of both sides, and at its mode "
        "of log-probs (docs/vllm.md). What was learnt from these answers is not saved: --resume goes on before them"
    )
