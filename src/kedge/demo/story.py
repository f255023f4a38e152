"""The texts of the demo: a few sentences before each step, and its numbers in words after it.

Pure functions. `kedge.commands.narrator` prints them and reads the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES: Mapping[str, str] = {"sft": "SFT", "ppo": "PPO", "grpo": "GRPO", "dpo": "DPO", "best8": "best of 8"}
"""Titles of the models, by the stages that train them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    title: str
    about: str


WORLD = (
    "Customers write to a shop, and a language model replies. A good reply repeats the facts right, is polite without "
    "fawning, and is short. We made this world, so we know the true preference (at most 5). Training never sees it."
)
STEPS: Mapping[str, Step] = {
    "prepare": Step(
        title="Prepare the data",
        about="People compared two replies to each message; one label in ten is wrong, as in life. Every file is "
        "audited, the evaluation's messages are kept out, and a sixth of the pairs is set aside.",
    ),
    "sft": Step(
        title="SFT: imitate",
        about="A model of 118 thousand random weights learns to write by imitating what the staff replied, good and "
        "bad alike.",
    ),
    "reward": Step(
        title="Reward model: learn what people prefer",
        about="A copy of that model learns from the pairs to score a reply. It is a proxy: all that PPO will ever see "
        "of the truth.",
    ),
    "ppo": Step(
        title="PPO: improve",
        about="The model replies, the reward model scores, and what scored well becomes likelier. KL, the distance "
        "from SFT, has a price and a limit: the anchor. Length has a price too. The truth is only watched.",
    ),
    "dpo": Step(
        title="DPO, for comparison",
        about="The same pairs, learnt directly: no reward model and no sampling.",
    ),
    "best8": Step(
        title="Best of 8, for comparison",
        about="SFT writes eight replies to each message; the model imitates those that the reward model likes best.",
    ),
    "eval": Step(
        title="Evaluate",
        about="All models reply to the same messages, which none of them has seen. Now the truth may speak.",
    ),
}
WITHOUT_KL = Step(
    title="PPO without its anchor: overoptimise",
    about="The same PPO, but neither KL nor length costs anything, and there is no limit. Watch the reward model's "
    "score rise while the truth falls.",
)


REAL_WORLD = (
    "SmolLM2-135M is asked everyday questions, each with instructions that a rule can check: fewer than so many words, "
    "no commas. It seldom follows them. The reward is the share that an answer follows; one that is too short, repeats "
    "itself or is beside the point scores 0."
)
REAL_STEPS: Mapping[str, Step] = {
    "grpo": Step(
        title="GRPO: improve",
        about="The model gives several answers to a question, the rules score them, and what scored above the others "
        "becomes likelier. KL, the distance from the model as it was, has a price and a limit: the anchor.",
    ),
    "eval": Step(
        title="Evaluate",
        about="The model as it was and the one that GRPO made answer questions that were never trained on. The reward "
        "is 1 where every instruction is followed.",
    ),
}


def name_of(model: str) -> str:
    return NAMES.get(model, model)


def iteration(metrics: Mapping[str, float], total: int) -> str:
    """One iteration of PPO; with the truth where it is known.

    >>> iteration({"step": 20, "gold/mean": 3.5, "reward/mean": 4.21, "kl/mean": 2.85, "length/mean": 29.1}, 50)
    'iteration 20 of 50: truth 3.50, reward 4.21, KL 2.9 nats, 29 tokens'
    """
    truth = f"truth {metrics['gold/mean']:.2f}, " if "gold/mean" in metrics else ""
    rest = f"reward {metrics['reward/mean']:.2f}, KL {metrics['kl/mean']:.1f} nats, {metrics['length/mean']:.0f} tokens"
    return f"iteration {metrics['step']} of {total}: {truth}{rest}"


def verdict(judge: str, score: float) -> str:
    return f"{'truth' if judge == 'gold' else judge} {score:.1f}"


def reply(text: str, verdict: str = "") -> str:
    """
    >>> reply("We are\\n very sorry.<|im_end|>", verdict("gold", 1.0))
    '“We are very sorry.” (truth 1.0)'
    """
    line = " ".join(text.partition("<|im_end|>")[0].split())
    return f"“{line}” ({verdict})" if verdict else f"“{line}”"


def babble(text: str) -> str:
    """The first printable words of a reply by random weights.

    >>> babble("\ufffd clock\\x01 clock" + " tears" * 60), babble("\ufffd\\x01")
    ('“clock clock tears tears tears tears tears tears …”', 'nothing that can be read')
    """
    words = "".join(letter for letter in text if letter.isprintable() and letter != "\ufffd").split()
    return f"“{' '.join(words[:8])} …”" if words else "nothing that can be read"


def audited(items: int, files: int, checks: int, bad: int) -> str:
    """
    >>> audited(19_000, 4, 60, 0)
    '19,000 texts in 4 files went through 60 checks (copies, leaks, broken lines, …): nothing is wrong with them.'
    """
    ending = f"{bad} things are worth a look:" if bad else "nothing is wrong with them."
    return f"{items:,} texts in {files} files went through {checks} checks (copies, leaks, broken lines, …): {ending}"


def judged(accuracy: float, best: float, pairs: int) -> str:
    """
    >>> judged(0.881, 0.9, 800)
    'It agrees with 88.1 % of 800 held-out labels. The best possible is 90.0 %: the other ones are wrong.'
    """
    agreement = f"It agrees with {_percent(accuracy)} of {pairs:,} held-out labels."
    return f"{agreement} The best possible is {_percent(best)}: the other ones are wrong."


def table(evaluation: Mapping[str, Any], judge: str) -> list[str]:
    """The models as rows, from `evaluation.json`; win rates are by the scores of `judge`, with 95 % intervals."""
    titles = {"gold": "true reward", "reward": "proxy reward" if judge == "gold" else "reward"}
    sources = [source for source in titles if source in next(iter(evaluation["models"].values()))["scores"]]
    by = " by the truth" if judge == "gold" else ""
    last = f"win rate over {name_of(evaluation['baseline'])}{by}"
    rows = [("", *(titles[source] for source in sources), "KL", "tokens", last)]
    for name, model in evaluation["models"].items():
        win = evaluation["comparisons"].get(name, {}).get(judge, {}).get("win_rate")
        share = f"{_percent(win['rate'])} [{_percent(win['low'])}, {_percent(win['high'])}]" if win else "–"
        means = (f"{model['scores'][source]['mean']['mean']:.2f}" for source in sources)
        kl = model["kl"]["mean"] if model["kl"] else 0.0
        rows.append((name_of(name), *means, f"{kl:.1f}", f"{model['length']['mean']:.1f}", share))
    return aligned(rows, has_words_last=True)


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def aligned(rows: Sequence[Sequence[str]], *, has_words_last: bool = False) -> list[str]:
    """Rows as lines: the first column, and with `has_words_last` the last one, to the left; the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, len(widths) - 1} if has_words_last else {0}
    cells = (
        [
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in cells]
