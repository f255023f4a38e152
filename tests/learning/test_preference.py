"""Preference methods on tasks whose answer is known: a bandit with a closed form, and the toy shop with its rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kedge.core.optimiser import OptimiserSettings
from kedge.data.batching import LabelledAnswers, TokenSequence, answer_batches, step_rows
from kedge.data.tokenizer import load_tokenizer
from kedge.models.forward.heads import language_model
from kedge.models.loading.load import load_causal
from kedge.models.training.learner import Learner
from kedge.models.training.preference_methods import DPO, NAMES
from kedge.models.training.preference_objectives import preference_objective
from kedge.models.training.train_step import trained_weights
from kedge.testing import toy

ARMS, PROMPT = 6, 0
REWARDS = (0.0, 1.2, -0.7, 0.5, 2.0, -1.5)


def bandit() -> PreTrainedModel:
    """A prompt of one token, an answer of one token: all that there is to know is one distribution."""
    config = LlamaConfig(
        vocab_size=ARMS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return cast(PreTrainedModel, LlamaForCausalLM(config))


def distribution(model: PreTrainedModel) -> list[float]:
    with torch.no_grad():
        return model(torch.tensor([[PROMPT]])).logits[0, 0].softmax(-1).tolist()


def preferences(count: int, start: list[float]) -> list[LabelledAnswers]:
    """Two different arms at random; the first is chosen with the probability of Bradley and Terry."""
    rng = Random(8)

    def answer(arm: int) -> TokenSequence:
        return TokenSequence(tokens=[PROMPT, arm], counted=[False, True])

    made: list[LabelledAnswers] = []
    for _ in range(count):
        one, other = rng.sample(range(ARMS), 2)
        if rng.random() > 1 / (1 + math.exp(REWARDS[other] - REWARDS[one])):
            one, other = other, one
        ref = (math.log(start[one]), math.log(start[other]))
        made.append(LabelledAnswers(sequences=(answer(one), answer(other)), is_good=(True, False), ref_logp=ref))
    return made


def learn(model: PreTrainedModel, method: DPO, items: list[LabelledAnswers], steps: int) -> None:
    settings = OptimiserSettings(lr=0.03, schedule="linear", warmup=0.0)
    policy = language_model(model)
    objective = preference_objective(policy, method)
    learner = Learner(trained_weights(model), policy.backbone, objective, settings, total_steps=steps)
    epochs = steps * 250 / len(items)
    for rows in step_rows(len(items), epochs=epochs, batch=250, seed=1):
        batch = answer_batches([items[row] for row in rows], rows=250, pad=0)
        learner.update(lambda _, batch=batch: batch)


@pytest.mark.parametrize("beta", [1.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_dpo_reaches_the_closed_form_of_the_bandit(beta: float) -> None:
    """π* ∝ π_ref exp(r / β): the same optimum that PPO with KL coefficient β has (Rafailov et al. 2023, eq. 4)."""
    model = bandit()
    start = distribution(model)
    weights = [p * math.exp(r / beta) for p, r in zip(start, REWARDS, strict=True)]
    best = [weight / sum(weights) for weight in weights]
    assert 0.5 * sum(abs(p - q) for p, q in zip(start, best, strict=True)) > 0.2  # there is something to learn
    learn(model, DPO(beta=beta), preferences(8000, start), steps=160)
    found = distribution(model)
    assert 0.5 * sum(abs(p - q) for p, q in zip(found, best, strict=True)) < 0.05


# The toy shop

# The chosen answers of the toy are better than the rejected ones and worse than the demonstrations: methods that
# imitate them do that with a small weight here, and where no reference holds the policy, the rate is smaller.
METHODS = {
    **{name: (name, 5e-4) for name in ("dpo", "ipo", "kto", "tdpo")},
    "orpo": ("{kind: orpo, beta: 1.0, sft_weight: 0.2}", 3e-4),
    "simpo": ("{kind: simpo, gamma: 0.5}", 2e-4),
    "cpo": ("{kind: cpo, sft_weight: 0.3}", 3e-4),
}
STAGE = """
  NAME:
    kind: preference
    from: sft
    method: METHOD
    data: pairs.jsonl
    batch: 32
    micro_batch: 32
    max_length: 64
    samples: 0
    eval: {every: 1000}
    checkpoints: {every: 1000}
    optimiser: {lr: RATE, beta2: 0.98}
"""


def mean_score(folder: Path, prompts: list[str]) -> float:
    """The mean of the true score of sampled answers."""
    model, tokenizer = load_causal(folder, dtype="float32"), load_tokenizer(folder)
    texts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(0)
    generate: Any = cast(Any, model).generate
    found = generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=24,
        do_sample=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    answers = tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    spoken = [re.sub(r"\s+([.,!?])", r"\1", answer) for answer in answers]
    return sum(map(toy.true_score, prompts, spoken)) / len(prompts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_method_raises_the_true_score_over_sft(
    seed: int,
    kedge: Callable[..., int],
    rows: Callable[..., Path],
    shop: Callable[..., None],
    tmp_path: Path,
) -> None:
    rows("pairs.jsonl", toy.pairs(2000, seed + 10))
    stages = "".join(
        STAGE.replace("NAME", name).replace("METHOD", method).replace("RATE", str(rate))
        for name, (method, rate) in METHODS.items()
    )
    shop(seed, stages)
    assert kedge("run", "shop.yaml", "--no-check") == 0
    prompts = [row["prompt"] for row in toy.prompts(400, seed + 20)]
    found = {name: mean_score(tmp_path / "runs/shop" / name / "model", prompts) for name in ("sft", *NAMES)}
    assert {name: score for name, score in found.items() if score < found["sft"] + 0.1} == {"sft": found["sft"]}
