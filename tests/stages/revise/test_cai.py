"""The simulated AI of `benchmarks/cai.py`, and Constitutional AI end to end at a small size."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import cai
import simulated_ai
from kedge.data.examples import Message
from kedge.demo.truth import read_reply, true_preference
from kedge.demo.world import Sizes, make
from kedge.feedback.constitution import read_constitution
from kedge.stages.revise.requests import critique_request, read_revision, revision_request

MESSAGE = "Hello. The kettle of order 107 smells of fish. May I have a refund?"
BAD = "Your message is important to us. We booked a voucher for order 107. Do not write again. Yours, the shop."
PRINCIPLES = [one for one in read_constitution(cai.CONSTITUTION) if one.id in cai.PRINCIPLES]


def revised(ai: simulated_ai.SimulatedAI, name: str, answer: str) -> str:
    (principle,) = (one for one in PRINCIPLES if one.id == name)
    prompt = (Message("user", MESSAGE),)
    critique = ai.reply(critique_request(prompt, answer, principle, seed=1))
    request, fence = revision_request(prompt, answer, critique, principle, seed=1)
    return read_revision(ai.reply(request), fence)


def test_a_skilled_critic_mends_what_the_principle_is_about_and_nothing_else() -> None:
    ai = simulated_ai.SimulatedAI(principles=PRINCIPLES, skill=1.0)
    rude, plain, facts = (read_reply(MESSAGE, revised(ai, name, BAD)) for name in ("rude", "plain", "facts"))
    assert (rude.counts["rudeness"], rude.counts["padding"], rude.facts["remedy"]) == (0, 1, "wrong")
    assert (plain.counts["rudeness"], plain.counts["padding"]) == (1, 0)
    assert (facts.counts["rudeness"], set(facts.facts.values())) == (1, {"right"})
    better = BAD
    for principle in PRINCIPLES:
        better = revised(ai, principle.id, better)
    assert true_preference(MESSAGE, better) > true_preference(MESSAGE, BAD) + 4


def test_a_critic_without_skill_sees_nothing() -> None:
    ai = simulated_ai.SimulatedAI(principles=PRINCIPLES, skill=0.0)
    assert revised(ai, "rude", BAD) == BAD


def test_its_skill_is_as_often_right_as_it_says() -> None:
    """Of rude replies to many messages, the share that is criticised."""
    ai = simulated_ai.SimulatedAI(principles=PRINCIPLES, skill=0.8)
    (rude,) = (one for one in PRINCIPLES if one.id == "rude")
    prompts = [row["prompt"] for row in make(3, Sizes(demonstrations=1, pairs=1, prompts=400, heldout=1))["prompts"]]
    requests = [critique_request((Message("user", text),), "Do not write again.", rude, seed=1) for text in prompts]
    noticed = sum(ai.reply(request) != simulated_ai.NOTHING for request in requests)
    assert noticed / len(prompts) == pytest.approx(0.8, abs=0.06)  # three standard errors


def test_a_choice_takes_the_side_with_fewer_faults() -> None:
    ai = simulated_ai.SimulatedAI(principles=PRINCIPLES, skill=1.0)
    polite = BAD.replace(" Do not write again.", "")
    assert len(simulated_ai.faults("rude", MESSAGE, BAD)) == 1
    assert simulated_ai.faults("rude", MESSAGE, polite) == []
    mark = f"[[{'0' * 32}]]"
    parts = [("conversation", f"user: {MESSAGE}"), ("answer A", BAD), ("answer B", polite)]
    texts = "\n".join(f"{mark} {name}\n{text}\n{mark} end of {name}" for name, text in parts)
    (rude,) = (one for one in PRINCIPLES if one.id == "rude")
    assert '"better": "B"' in ai.reply(f"{rude.choice}\n{texts}")
    (plain,) = (one for one in PRINCIPLES if one.id == "plain")
    assert '"better": "tie"' in ai.reply(f"{plain.choice}\n{texts}")
    assert simulated_ai.mended("rude", MESSAGE, polite, Random(1)).endswith(polite)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rude_replies_fall_by_the_truth(tmp_path: Path) -> None:
    results = cai.run_seed(1, tmp_path / "cai", cai.SMALL)
    before, supervised, reinforced = (results[name] for name in cai.MODELS)
    assert before.share > 0.1
    assert supervised.share < 0.6 * before.share
    assert reinforced.share < 0.4 * before.share
    assert "after RL-CAI" in cai.table([1], [results])
