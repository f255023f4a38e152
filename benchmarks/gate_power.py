"""How often the gate is right: simulated exams of the real sizes, decided by the rules that ship.

    python benchmarks/gate_power.py [--seeds 200]

- one exam: MMLU, 14,042 items, margin 1 point. Equal models that differ in 10 % of their answers should pass; a model
  that has lost 3 points must fail.
- the whole default `gate.yaml` on equal models, rule by rule and all together (the aim is that 80 % pass), and what
  more items or a clearer gain would change. A gate needs an improvement too: the win
  rate over the baseline is 0.56 on 805 prompts. Models differ from their baselines in the shares of answers of `EXAMS`;
  rates below limits are those of `RATES`. Both are assumptions, and the table says what they are.
- the same rules on a model that is exactly at every margin and limit: each may pass it in 5 % of trials. A rule that
  does so in about 5 % is as sharp as its bound allows; more power needs more items.

Exit code 1 where one exam alone is decided wrongly too often.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kedge.evaluate import non_inferiority
from kedge.gate.decide import decide, overall
from kedge.gate.evidence import Answers, Evidence, ExamFacts, Item, PromptAnswers, Role
from kedge.gate.results import RuleResult
from kedge.gate.rules import Rules, default_rules, load_rules

MMLU_ITEMS, MARGIN, DISCORDANT = 14_042, 0.01, 0.10
WIN_RATE, PROMPTS = 0.56, 805


@dataclass(frozen=True, slots=True)
class SimulatedExam:
    metric: str
    items: int
    accuracy: float
    discordant: float
    """Share of the items that one of two equal models gets right and the other does not."""


EXAMS: Mapping[str, SimulatedExam] = {
    "mmlu": SimulatedExam("letter", MMLU_ITEMS, 0.60, 0.10),
    "piqa": SimulatedExam("letter", 1_838, 0.78, 0.076),
    "gsm8k": SimulatedExam("strict", 1_319, 0.50, 0.156),
    "truthfulqa": SimulatedExam("mc1", 817, 0.40, 0.119),
    "ifeval": SimulatedExam("prompt_strict", 541, 0.55, 0.20),
}
RATES: Mapping[str, tuple[str, int, float]] = {
    "harmbench": ("complied", 200, 0.01),
    "xstest": ("refused_safe", 250, 0.08),
    "sycophancy": ("flips", 1_050, 0.12),
}
BBQ_BIAS = 0.03
"""The share of biased answers to ambiguous questions beyond those that are biased the other way; 0.4 are either."""
KL_MEAN, KL_SD = 6.0, 4.0
LENGTH_RATIO = 1.15


@dataclass(frozen=True, slots=True)
class Scenario:
    """What differs between the simulations of the whole gate."""

    name: str
    bbq_items: int
    """Ambiguous questions."""
    win_rate: float
    is_at_limits: bool = False
    """Whether the candidate has lost every margin, and reaches every limit."""


AT_LIMITS = Scenario("a model at every margin and limit", 720, 0.5, is_at_limits=True)
SCENARIOS = (
    Scenario("the whole default gate.yaml", 720, WIN_RATE),
    Scenario("  with all of BBQ", 29_246, WIN_RATE),
    Scenario("  with all of BBQ, win rate 0.58", 29_246, 0.58),
)
"""720 are the ambiguous half of 1,440 items in six of the eleven categories."""


def one_exam(random: np.random.Generator, *, loss: float) -> str:
    """The verdict about a model that has lost so much of MMLU, and differs in 10 % of the answers."""
    lost, gained = (DISCORDANT + loss) / 2, (DISCORDANT - loss) / 2
    kind_N = random.choice(3, size=MMLU_ITEMS, p=[lost, gained, 1 - DISCORDANT])
    same_N = random.random(MMLU_ITEMS) < 0.6
    candidate_N = np.where(kind_N == 0, 0.0, np.where(kind_N == 1, 1.0, same_N))
    baseline_N = np.where(kind_N == 0, 1.0, np.where(kind_N == 1, 0.0, same_N))
    return non_inferiority(candidate_N.tolist(), baseline_N.tolist(), margin=MARGIN).verdict


def whole_gate(random: np.random.Generator, rules: Rules, scenario: Scenario) -> list[RuleResult]:
    margins = {name: keep.margin for name, keep in rules.settings.keep.items()}
    thresholds = {**margins, **rules.settings.limit} if scenario.is_at_limits else {}
    scores, answers = dict(_scores(random, scenario, thresholds)), _answers(random, scenario, thresholds)
    return decide(rules, Evidence(exams=_FACTS, scores=scores, evaluations=[answers], files={}))


def _facts(metric: str, better: str) -> ExamFacts:
    return ExamFacts(items_hash="", main=metric, better={metric: better}, settings={}, where=Path())


_FACTS: Mapping[str, ExamFacts] = {
    **{name: _facts(exam.metric, "more") for name, exam in EXAMS.items()},
    **{name: _facts(metric, "less") for name, (metric, _, _) in RATES.items()},
    "bbq": ExamFacts(
        items_hash="", main="accuracy", better={"accuracy": "more", "ambiguous": "less"}, settings={}, where=Path()
    ),
}


def _items(scores: np.ndarray) -> dict[str, Item]:
    return {str(n): Item(score=float(score), cluster=str(n), groups={}) for n, score in enumerate(scores)}


def _scores(
    random: np.random.Generator, scenario: Scenario, thresholds: Mapping[str, float]
) -> Iterator[tuple[tuple[str, str, Role], dict[str, Item]]]:
    """`thresholds` are those that the candidate is at; without any it is equal to its baseline."""
    for name, exam in EXAMS.items():
        loss = thresholds.get(name, 0.0)
        gained, lost = (exam.discordant - loss) / 2, (exam.discordant + loss) / 2
        both = exam.accuracy - exam.discordant / 2
        kind_N = random.choice(4, size=exam.items, p=[gained, lost, both, 1 - both - exam.discordant])
        yield (name, exam.metric, "candidate"), _items(np.isin(kind_N, (0, 2)))
        yield (name, exam.metric, "baseline"), _items(np.isin(kind_N, (1, 2)))
    for name, (metric, items, rate) in RATES.items():
        yield (name, metric, "candidate"), _items(random.random(items) < thresholds.get(f"{name}.{metric}", rate))
    bias = thresholds.get("bbq.ambiguous", BBQ_BIAS)
    biased = random.choice([1.0, -1.0, 0.0], size=scenario.bbq_items, p=[0.2 + bias / 2, 0.2 - bias / 2, 0.6])
    yield ("bbq", "ambiguous", "candidate"), _items(biased)


def _answers(random: np.random.Generator, scenario: Scenario, thresholds: Mapping[str, float]) -> Answers:
    """The judge likes longer answers a little; the win rate is that at equal lengths."""
    length_N = random.lognormal(5.0, 0.5, size=PROMPTS)
    ratio = thresholds["length.ratio"] / np.exp(0.25**2 / 2) if thresholds else LENGTH_RATIO
    own_N = length_N * ratio * random.lognormal(0.0, 0.25, size=PROMPTS)
    gap_N = own_N - length_N
    slope = 0.5
    logit_N = np.log(scenario.win_rate / (1 - scenario.win_rate)) + slope * np.tanh(gap_N / gap_N.std())
    wins_N = random.random(PROMPTS) < 1 / (1 + np.exp(-logit_N))
    kl_N = np.maximum(0.0, random.normal(thresholds.get("kl", KL_MEAN), KL_SD, size=PROMPTS))
    own = {
        str(n): PromptAnswers(scores={"gold": [float(wins_N[n])]}, length=float(own_N[n]), kl=float(kl_N[n]))
        for n in range(PROMPTS)
    }
    other = {str(n): PromptAnswers(scores={"gold": [0.5]}, length=float(length_N[n]), kl=None) for n in range(PROMPTS)}
    names: dict[Role, str] = {"candidate": "ppo", "baseline": "sft"}
    return Answers(models={"sft": other, "ppo": own}, names=names, measured_from="sft", tie=1e-4, where=Path())


def shipped_rules() -> Rules:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "gate.yaml"
        file.write_text(default_rules(), encoding="utf-8")
        return load_rules(file)


def simulate_one(seeds: int, *, loss: float) -> Counter[str]:
    return Counter(one_exam(np.random.default_rng(seed), loss=loss) for seed in range(seeds))


@dataclass(frozen=True, slots=True)
class Simulated:
    whole: Counter[str]
    single: dict[str, Counter[str]]
    """By rule."""
    without: Counter[str]
    """By rule: how often the whole would pass if that rule were not there."""


def simulate_whole(seeds: int, scenario: Scenario = SCENARIOS[0]) -> Simulated:
    rules = shipped_rules()
    counts = Simulated(Counter(), {}, Counter())
    for seed in range(seeds):
        results = whole_gate(np.random.default_rng(seed), rules, scenario)
        counts.whole[overall(results)] += 1
        for result in results:
            name = f"{result.section} {result.name}"
            counts.single.setdefault(name, Counter())[result.verdict] += 1
            counts.without[name] += overall([other for other in results if other is not result]) == "pass"
    return counts


def _line(name: str, counts: Counter[str], about: str = "") -> str:
    total = sum(counts.values())
    shares = "  ".join(f"{100 * counts[verdict] / total:7.1f} %" for verdict in ("pass", "undecided", "fail"))
    return f"{name:34}{shares}  {about}".rstrip()


def _about(rule: str) -> str:
    name = rule.split()[1].partition(".")[0]
    if name in EXAMS:
        exam = EXAMS[name]
        return f"{exam.items:,} items, {100 * exam.discordant:.1f} % discordant"
    if name in RATES:
        _, items, rate = RATES[name]
        return f"{items:,} items, true rate {100 * rate:g} %"
    facts = {
        "win_rate": f"{PROMPTS} prompts, true rate {WIN_RATE} at equal length",
        "bbq": f"{SCENARIOS[0].bbq_items:,} ambiguous items, true bias {BBQ_BIAS}",
        "kl": f"{PROMPTS} prompts, true mean {KL_MEAN:g} nats",
        "length": f"{PROMPTS} prompts, true ratio about {LENGTH_RATIO}",
    }
    return facts[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    seeds: int = parser.parse_args().seeds
    print(f"{seeds} seeds{'':24}{'pass':>9}  {'undecided':>9}  {'fail':>9}")
    equal, worse = simulate_one(seeds, loss=0.0), simulate_one(seeds, loss=0.03)
    print(_line("mmlu alone, equal models", equal, f"{MMLU_ITEMS:,} items, margin {MARGIN}"))
    print(_line("mmlu alone, 3 points lost", worse))
    simulated = simulate_whole(seeds)
    for name, counts in simulated.single.items():
        without = f"; without it the whole passes in {100 * simulated.without[name] / seeds:.1f} %"
        print(_line(name, counts, _about(name) + without))
    print(_line(SCENARIOS[0].name, simulated.whole, "equal models, aim 80 % pass"))
    for scenario in SCENARIOS[1:]:
        print(_line(scenario.name, simulate_whole(seeds, scenario).whole))
    at_limits = simulate_whole(seeds, AT_LIMITS)
    print(_line(AT_LIMITS.name, at_limits.whole, "each rule may pass in 5 %, all of them together hardly ever"))
    for name, counts in at_limits.single.items():
        print(_line(f"  {name}", counts))
    is_right = equal["pass"] >= 0.9 * seeds and equal["fail"] <= 0.05 * seeds and worse["fail"] == seeds
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
