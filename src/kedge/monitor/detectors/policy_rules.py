"""Detectors of the policy: its answers (length, truncation, repetition, variety) and its updates (entropy, clipping,
gradients, the critic, numbers that are not finite)."""

from __future__ import annotations

import math
from statistics import fmean

from kedge.monitor.detectors.watchdog import START, Detector, Sign, Window


def longer(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("length/mean", 5), window.early("length/mean")
    if mean is None or early is None or mean <= threshold * early:
        return None
    return Sign(
        message=f"answers have grown from {early:.0f} tokens at the start to {mean:.0f}",
        evidence={"start": early, "now": mean},
    )


def truncated(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("length/truncated", 5)
    if mean is None or mean <= threshold:
        return None
    return Sign(message=f"{mean:.0%} of the answers are cut off before they end", evidence={"share": mean})


def never_end(window: Window, threshold: float) -> Sign | None:
    """From the first step on: a policy that learns not to end its answers has ended some before."""
    shares = [row.get("length/truncated", math.nan) for row in window.start]
    if window.num_steps != START or not all(share >= threshold for share in shares):
        return None
    return Sign(
        message=f"{min(shares):.0%} of the answers or more are cut off in each of the first {START} steps: the "
        "end-of-turn token is not sampled, or not recognised",
        evidence={"share": min(shares)},
    )


def same_prompts(window: Window, threshold: float) -> Sign | None:
    mean = window.mean("prompts/repeated", 10)
    if mean is None or mean <= threshold:
        return None
    return Sign(
        message=f"{mean:.0%} of the prompts of an iteration were those of the iteration before, over 10 steps",
        evidence={"share": mean},
    )


def repetition(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("repetition/mean", 5), window.early("repetition/mean")
    if mean is None or early is None or mean <= max(threshold, 1.5 * early):
        return None
    return Sign(
        message=f"{mean:.0%} of the 4-grams repeat an earlier one of the same answer, up from {early:.0%}",
        evidence={"start": early, "now": mean},
    )


def less_distinct(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("distinct/mean", 5), window.early("distinct/mean")
    if mean is None or early is None or mean >= threshold * early:
        return None
    return Sign(
        message=f"distinct 2-grams have fallen from {early:.0%} of all at the start to {mean:.0%}",
        evidence={"start": early, "now": mean},
    )


def alike(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean("similarity/mean", 5), window.early("similarity/mean")
    if mean is None or early is None or mean <= max(threshold, 1.5 * early):
        return None
    return Sign(
        message=f"two answers now share {mean:.0%} of their 2-grams, up from {early:.0%} at the start",
        evidence={"start": early, "now": mean},
    )


ANSWER_DETECTORS = (
    Detector(
        code="answers.longer",
        reads=("length/mean",),
        rule=longer,
        says="mean of 5 steps > {threshold:g} × the mean of the first 5",
        source="length is the first thing that a reward model is hacked by (Singhal et al. 2023); simulated false "
        "alarms",
        cause="longer answers score more, or end-of-turn tokens are no longer found worth emitting",
        advice="look at reward/length_correlation; add a length penalty, or train the reward model with "
        "loss.length_control",
    ),
    Detector(
        code="answers.truncated",
        reads=("length/truncated",),
        rule=truncated,
        says="mean of 5 steps > {threshold:g}",
        source="a cut answer is scored at a place where it was not meant to end (Huang et al. 2024, the EOS trick)",
        cause="the policy does not end its answers: max_new_tokens is too small, the end-of-turn token is not the one "
        "it learnt, or is masked in training",
        advice="check with kedge check that targets end in the end-of-turn token; raise max_new_tokens; penalise "
        "answers without an end",
    ),
    Detector(
        code="answers.never_end",
        reads=("length/truncated",),
        rule=never_end,
        says="each of the first 5 steps ≥ {threshold:g}",
        source="a model that was taught to end its answers ends some of them",
        cause="the end-of-turn token is never sampled (masked, min_new_tokens at max_new_tokens), another one is "
        "waited for, or max_new_tokens is far too small",
        advice="sample one answer with a large max_new_tokens and look for the token that ends it",
    ),
    Detector(
        code="prompts.repeated",
        reads=("prompts/repeated",),
        rule=same_prompts,
        says="mean of 10 steps > {threshold:g}",
        source="prompts are drawn without repeats until all were asked; not measured with fewer than two batches",
        cause="every iteration asks the same prompts: the order does not go on, or the file holds few different ones",
        advice="look at the prompts in samples.jsonl; run kedge data check on the file",
    ),
    Detector(
        code="answers.repetition",
        reads=("repetition/mean",),
        rule=repetition,
        says="mean of 5 steps > {threshold:g} and > 1.5 × the mean of the first 5",
        source="degenerate text repeats its n-grams many times as often as people do (Welleck et al. 2020); "
        "simulated false alarms",
        cause="the policy has found a phrase that scores and says it again and again, or has lost its entropy",
        advice="raise kl.start; look at entropy/mean; read the samples with the highest reward",
    ),
    Detector(
        code="answers.less_distinct",
        reads=("distinct/mean",),
        rule=less_distinct,
        says="mean of 5 steps < {threshold:g} × the mean of the first 5",
        source="distinct-n (Li et al. 2016) falls under RLHF (Kirk et al. 2024); simulated false alarms",
        cause="answers use ever fewer words: mode collapse, or a phrase that always scores",
        advice="raise kl.start or lower kl.target; lower actor.lr",
    ),
    Detector(
        code="answers.alike",
        reads=("similarity/mean",),
        rule=alike,
        says="mean of 5 steps > {threshold:g} and > 1.5 × the mean of the first 5",
        source="diversity across prompts falls under RLHF (Kirk et al. 2024); simulated false alarms",
        cause="every prompt gets much the same answer: mode collapse",
        advice="raise kl.start or lower kl.target; lower actor.lr; use more varied prompts",
    ),
)


ENTROPY, CLIP_FRACTION, MISMATCH = "entropy/mean", "policy/clip_fraction", "policy/mismatch"
AGE = "age/mean"
APPROX_KL = "policy/approx_kl"
POLICY_GRADIENT, VALUE_GRADIENT = "policy/grad_norm", "value/grad_norm"
USEFUL = 0.3
"""Explained variance above which a critic is of use, whatever its loss is."""
VALUE_LOSS, EXPLAINED = "value/loss", "value/explained_variance"
# Correlations and explained variances are left out: where nothing varies they are not defined, and nothing is wrong.
FINITE = ("reward/mean", "kl/mean", ENTROPY, "policy/loss", POLICY_GRADIENT, VALUE_LOSS, VALUE_GRADIENT)


def entropy_collapse(window: Window, threshold: float) -> Sign | None:
    mean, early = window.mean(ENTROPY, 5), window.early(ENTROPY)
    if mean is None or early is None or mean >= threshold * early:
        return None
    return Sign(
        message=f"entropy has fallen from {early:.3g} nats a token at the start to {mean:.3g}",
        evidence={"start": early, "now": mean},
    )


def clips_often(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(CLIP_FRACTION, 5)
    if mean is None or mean <= threshold:
        return None
    return Sign(message=f"{mean:.0%} of the tokens are clipped: updates are too large", evidence={"share": mean})


def large_steps(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(APPROX_KL, 3)
    if mean is None or mean <= threshold:
        return None
    return Sign(
        message=f"the updates of one batch move the policy by {mean:.2g} nats a token: far too much",
        evidence={"approx_kl": mean},
    )


def never_clips(window: Window, threshold: float) -> Sign | None:
    values = window.values(CLIP_FRACTION)[-int(threshold) :]
    if not window.is_fresh(CLIP_FRACTION) or len(values) < threshold or any(values):
        return None
    return Sign(
        message=f"not one token was clipped in {len(values)} steps: updates are small, or there is one a batch",
        evidence={"steps": len(values)},
    )


def mismatch(window: Window, threshold: float) -> Sign | None:
    """`threshold` is that of the precision in use where the settings leave it open. Older answers were sampled by other
    weights than are compared, so only those of the policy itself are judged: under a lag the first batch alone, which
    has twice the room."""
    ages, values = window.column(AGE), window.column(MISMATCH)
    own = [value for value, age in zip(values, ages, strict=True) if math.isfinite(value) and not age > 0]
    if window.latest.get(AGE, 0.0) > 0:
        has_just_aged = len(ages) > 1 and not ages[-2] > 0
        mean = fmean(own[-3:]) if own and has_just_aged else None
        threshold = threshold if len(own) >= 3 else 2 * threshold
    else:
        mean = fmean(own[-3:]) if window.is_fresh(MISMATCH) and len(own) >= 3 else None
    if mean is None or mean <= threshold:
        return None
    return Sign(
        message=f"log-probs of the generator and the trainer differ by {mean:.3g} nats a token",
        evidence={"mismatch": mean},
    )


def policy_gradient_spike(window: Window, threshold: float) -> Sign | None:
    return _spike(window, POLICY_GRADIENT, "policy", threshold)


def value_gradient_spike(window: Window, threshold: float) -> Sign | None:
    return _spike(window, VALUE_GRADIENT, "critic", threshold)


def loss_explodes(window: Window, threshold: float) -> Sign | None:
    values, usual = window.values(VALUE_LOSS), window.before(VALUE_LOSS, last=3, at_most=20, at_least=5)
    if usual is None or (now := fmean(values[-3:])) <= threshold * usual:
        return None
    return Sign(message=f"the value loss is {now:.3g}; it was about {usual:.3g}", evidence={"usual": usual, "now": now})


def worse_than_nothing(window: Window, threshold: float) -> Sign | None:
    """In the first steps KL is about 0 and returns are the scores, so a critic that predicts 0 has as its loss half
    their mean square."""
    now = window.latest
    loss, mean, std = (now.get(name, math.nan) for name in (VALUE_LOSS, "reward/mean", "reward/std"))
    nothing = (mean**2 + std**2) / 2
    explained = now.get(EXPLAINED, 0.0)
    # Normalised scores are on another scale than these metrics.
    if window.num_steps > START or window.score_std is not None or not loss > threshold * nothing > 0:
        return None
    if explained > USEFUL:
        return None
    return Sign(
        message=f"the critic's loss is {loss:.3g} while it learns; saying 0 of every answer would cost {nothing:.3g}",
        evidence={"loss": loss, "nothing": nothing},
    )


def explains_nothing(window: Window, threshold: float) -> Sign | None:
    mean = window.mean(EXPLAINED, 10)
    if mean is None or window.num_steps < 20 or mean >= threshold:
        return None
    return Sign(
        message=f"the critic explains {mean:.2f} of the returns' variance over 10 steps: a constant would do as well",
        evidence={"explained_variance": mean},
    )


def not_finite(window: Window, threshold: float) -> Sign | None:
    broken = {name: value for name in FINITE if not math.isfinite(value := window.latest.get(name, 0.0))}
    if not broken:
        return None
    evidence = {name: str(value) for name, value in broken.items()}
    return Sign(message=f"{', '.join(broken)}: not a finite number", evidence=evidence)


def _spike(window: Window, name: str, whose: str, threshold: float) -> Sign | None:
    usual = window.before(name, last=1, at_most=20, at_least=10)
    if usual is None or (now := window.latest[name]) <= threshold * usual:
        return None
    return Sign(
        message=f"the gradient of the {whose} has a norm of {now:.3g}; it was about {usual:.3g}",
        evidence={"usual": usual, "now": now},
    )


UPDATE_DETECTORS = (
    Detector(
        code="policy.entropy_collapse",
        reads=(ENTROPY,),
        rule=entropy_collapse,
        says="mean of 5 steps < {threshold:g} × the mean of the first 5",
        source="a policy pays for reward with entropy and stops learning where none is left (Cui et al. 2025); "
        "simulated false alarms",
        cause="the policy has become certain too early and explores no more",
        advice="lower actor.lr; raise kl.start; sample at temperature 1",
    ),
    Detector(
        code="policy.clips_often",
        reads=(CLIP_FRACTION,),
        rule=clips_often,
        says="mean of 5 steps > {threshold:g}",
        source="clipping is there for the exceptions (Schulman et al. 2017, section 3); simulated false alarms",
        cause="the learning rate is too high, or there are too many epochs on the same answers",
        advice="lower actor.lr threefold, or epochs to 1",
    ),
    Detector(
        code="policy.large_steps",
        reads=(APPROX_KL,),
        rule=large_steps,
        says="mean of 3 steps > {threshold:g} nats a token",
        source="the surrogate holds near the policy that sampled; passes are usually ended at 0.015 to 0.03 nats "
        "(Schulman et al. 2017; `stop_at_kl`); simulated false alarms",
        cause="the learning rate is far too high",
        advice="lower actor.lr tenfold; set loss.policy.stop_at_kl: 0.03",
    ),
    Detector(
        code="policy.never_clips",
        level="info",
        reads=(CLIP_FRACTION,),
        rule=never_clips,
        says="exactly 0 in {threshold:g} steps",
        source="with several updates a batch some ratio leaves [0.8, 1.2] unless updates are tiny",
        cause="the learning rate is too small to matter, or each batch gets one update (then nothing is wrong)",
        advice="if the reward does not rise either, raise actor.lr threefold",
    ),
    Detector(
        code="policy.mismatch",
        reads=(MISMATCH, AGE),
        rule=mismatch,
        says="mean of 3 steps > {threshold:g} nats a token, of answers of age 0 alone; with a lag, twice that in the "
        "first step",
        source="by default 0.005 in float32, which agrees to 1e-4, and to 1e-3 where products are rounded to TF32; "
        "0.02 in float16; 0.05 in bfloat16, which keeps 8 bits: of SmolLM2-135M the same layers with the terms of "
        "their sums in another order are 0.026 apart, of random weights 0.009",
        cause="generator and trainer do not compute the same thing: stale weights, other temperature or precision, "
        "shifted or shuffled log-probs",
        advice="compare them on one batch in float32; make sampling settings equal; check when weights are handed over",
    ),
    Detector(
        code="policy.gradient_spike",
        reads=(POLICY_GRADIENT,),
        rule=policy_gradient_spike,
        says="> {threshold:g} × the median of the 20 steps before (10 at least)",
        source="simulated false alarms, log-normal norms",
        cause="one batch was unlike the rest: an extreme score, or a ratio that ran off",
        advice="read the samples of this step; clip the scores; lower actor.clip",
    ),
    Detector(
        code="value.gradient_spike",
        reads=(VALUE_GRADIENT,),
        rule=value_gradient_spike,
        says="> {threshold:g} × the median of the 20 steps before (10 at least)",
        source="simulated false alarms, log-normal norms",
        cause="one batch had returns unlike the rest: an extreme score, or a jump of the KL penalty",
        advice="read the samples of this step; clip the scores; lower critic.clip",
    ),
    Detector(
        code="value.loss_explodes",
        reads=(VALUE_LOSS,),
        rule=loss_explodes,
        says="mean of 3 steps > {threshold:g} × the median of the 20 before (5 at least)",
        source="simulated false alarms",
        cause="the returns have moved faster than the critic can follow, or its learning rate is too high",
        advice="lower critic.lr threefold; normalise or clip the scores",
    ),
    Detector(
        code="value.worse_than_nothing",
        reads=(VALUE_LOSS, "reward/mean", "reward/std", EXPLAINED),
        rule=worse_than_nothing,
        says="first 5 steps, scores as they are: > {threshold:g} × half the mean square of the scores, and explains no "
        "more than 0.3 of the returns' variance",
        source="½ E[R²] is the loss of a critic that says 0, and R is the score while KL is 0; at most 1.1 times that "
        "in healthy runs of the library below; simulated false alarms",
        cause="the critic's updates overshoot: its learning rate is far too high",
        advice="lower critic.lr tenfold",
    ),
    Detector(
        code="value.explains_nothing",
        reads=(EXPLAINED,),
        rule=explains_nothing,
        says="after 20 steps, mean of 10 steps < {threshold:g}",
        source="a constant explains 0 by definition; simulated false alarms",
        cause="the critic does not learn: its learning rate is too small, or it is not connected to its loss",
        advice="raise critic.lr; warm the critic up alone first; start it from the reward model",
    ),
    Detector(
        code="not_finite",
        level="fatal",
        reads=FINITE,
        rule=not_finite,
        says="any of these is NaN or infinite in this step",
        source="arithmetic",
        cause="an overflow: a learning rate far too high, a score without bounds, or log-probs in half precision",
        advice="look at the first step where it happens and the batch kept with it; lower actor.lr tenfold; clip the "
        "scores",
    ),
)
