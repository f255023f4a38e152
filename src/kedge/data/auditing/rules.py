"""The rules of the audit with their level, reason and fix: one row a rule, the only place that holds a threshold.

A rule counts offenders among a total. Any offender gives `level`; a share above `worse_above` gives `worse`.
`fatal` means that training would learn the wrong thing, or that a result on held-out data would not be believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.core.findings import Finding, Level

LENGTH_BIAS_ABOVE = 0.6
"""Length is a warning when the whole 95 % interval of "the longer wins" lies above this (or below one minus this): a
reward model then earns 60 % by counting characters, and PPO will find that out. Any interval without 50 % is a note."""

OUTLIER_TIMES_MEDIAN = 20
"""An item this many times as long as the file's median item is an outlier: most often a log or a missed split."""

EXAMPLES_PER_FINDING = 8
"""Offenders shown for each finding; the counts are always complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`noun` is what is counted, `what` completes "3 of 40 pairs …"; `passed` is said instead of "No pairs …"."""

    noun: str
    what: str
    level: Level
    worse_above: float = 1.0
    worse: Level = "fatal"
    reason: str
    fix: str
    passed: str = ""


RULES: Mapping[str, Rule] = {
    "reading.broken": Rule(
        noun="lines",
        what="cannot be read",
        level="warning",
        reason="A few broken lines are accidents of copying; many mean that the file is not what it is taken for.",
        fix="Mend or remove these lines; `kedge data convert` writes them to a file of their own.",
    ),
    "reading.nothing": Rule(
        noun="files",
        what="hold no item at all",
        level="fatal",
        reason="Training on nothing succeeds at once and teaches nothing.",
        fix="Check the path and the format of the file.",
    ),
    "empty.prompt": Rule(
        noun="items",
        what="have an empty prompt",
        level="warning",
        worse_above=0.01,
        reason="The model learns what to say when nothing was asked.",
        fix="Remove these items, or restore their prompts.",
    ),
    "empty.chosen": Rule(
        noun="pairs",
        what="prefer an empty answer",
        level="warning",
        worse_above=0.01,
        reason="An empty chosen answer rewards saying nothing, and its log-prob is a sum over no token but the end.",
        fix="Remove these pairs.",
    ),
    "empty.rejected": Rule(
        noun="pairs",
        what="reject an empty answer",
        level="warning",
        worse_above=0.01,
        reason="Beating nothing teaches no preference between real answers.",
        fix="Remove these pairs.",
    ),
    "empty.answer": Rule(
        noun="items",
        what="have an empty answer",
        level="warning",
        worse_above=0.01,
        reason="There is no token to learn from but the end of the turn.",
        fix="Remove these items.",
    ),
    "pairs.identical": Rule(
        noun="pairs",
        what="have the same text on both sides",
        level="warning",
        worse_above=0.01,
        reason="They teach nothing, and accuracy on them is a coin toss, so the score of the reward model is off.",
        fix="Remove these pairs.",
    ),
    "pairs.same_words": Rule(
        noun="pairs",
        what="have the same words on both sides and differ in case, punctuation or spacing alone",
        level="warning",
        worse_above=0.05,
        reason="Such a preference is most often noise of the labelling; all it can teach is a full stop.",
        fix="Look at them; remove those that mean nothing.",
    ),
    "pairs.contradictory": Rule(
        noun="pairs",
        what="are also labelled the other way round",
        level="warning",
        worse_above=0.01,
        reason="The two labels cancel out, and no reward model can be right on both.",
        fix="Keep the label of the majority, or remove all of them.",
    ),
    "thumbs.contradictory": Rule(
        noun="answers",
        what="are both liked and disliked",
        level="warning",
        worse_above=0.01,
        reason="The two labels cancel out.",
        fix="Keep the label of the majority, or remove all of them.",
    ),
    "thumbs.one_sided": Rule(
        noun="thumbs",
        what="point the same way",
        passed="There are thumbs of both kinds",
        level="warning",
        reason="Without the other side a model learns to like everything, or nothing.",
        fix="Add answers of the other kind.",
    ),
    "pairs.longer_wins": Rule(
        noun="pairs",
        what="prefer the longer answer",
        passed="Length does not decide which answer is preferred",
        level="info",
        worse="warning",
        reason="A reward model learns length before anything else, and PPO then writes ever longer answers.",
        fix="Balance the pairs by length, or judge with a length-controlled win rate.",
    ),
    "pairs.shorter_wins": Rule(
        noun="pairs",
        what="prefer the shorter answer",
        level="info",
        worse="warning",
        reason="A reward model learns shortness before anything else, and PPO then says less and less.",
        fix="Balance the pairs by length, or judge with a length-controlled win rate.",
    ),
    "duplicates.exact": Rule(
        noun="items",
        what="repeat an earlier item word for word",
        level="info",
        worse_above=0.01,
        worse="warning",
        reason="Repeats weigh double in training, and land on both sides of a split that is not made by prompt.",
        fix="Remove the repeats, and split by prompt.",
    ),
    "duplicates.prompts": Rule(
        noun="items",
        what="share their prompt with an earlier item",
        level="info",
        reason="Several answers to a prompt are normal for preferences; a split must keep them together.",
        fix="Split by prompt: `kedge data split --by prompt`.",
    ),
    "duplicates.near_prompts": Rule(
        noun="distinct prompts",
        what="are near duplicates of another",
        level="info",
        worse_above=0.05,
        worse="warning",
        reason="Many variants of one prompt narrow the data, and a split by exact prompt leaks across them.",
        fix="Keep one of each cluster.",
    ),
    "duplicates.near_conversations": Rule(
        noun="distinct conversations",
        what="are near duplicates of another",
        level="info",
        worse_above=0.05,
        worse="warning",
        reason="Near copies weigh double in training and are learnt by heart.",
        fix="Keep one of each cluster.",
    ),
    "length.outlier": Rule(
        noun="items",
        what=f"are more than {OUTLIER_TIMES_MEDIAN} times as long as the median item",
        level="info",
        reason="They set the peak of memory, and are most often logs, dumps or missed splits.",
        fix="Look at them; set a maximum length.",
    ),
    "length.over_window": Rule(
        noun="items",
        what="do not fit the window with their answers",
        level="warning",
        worse_above=0.1,
        reason="Their ends are cut off, so the model learns not to stop.",
        fix="Raise the window, or remove these items.",
    ),
    "length.prompt_over_window": Rule(
        noun="items",
        what="have a prompt that fills the window",
        level="fatal",
        reason="No room is left for an answer: nothing of it is trained, or nothing is generated.",
        fix="Raise the window, or remove these items.",
    ),
    "tokens.special": Rule(
        noun="items",
        what="contain the control tokens of a chat template as text",
        level="warning",
        worse_above=0.01,
        reason="A tokenizer reads them as control tokens: turns end early or are forged.",
        fix="Remove the strings from the contents; the template adds its own.",
    ),
    "tokens.model": Rule(
        noun="items",
        what="contain special tokens of this model as text",
        level="warning",
        worse_above=0.001,
        reason="This model's tokenizer reads them as control tokens, so these very items are trained wrongly.",
        fix="Remove the strings from the contents; the template adds its own.",
    ),
    "template.transcript": Rule(
        noun="items",
        what="contain turn markers of a plain transcript inside a message",
        level="warning",
        worse_above=0.1,
        reason="Turns that are not cut apart teach the model to write both sides of the conversation.",
        fix="Convert the file (`kedge data convert`), so that each turn is a message.",
    ),
    "template.refused": Rule(
        noun="items",
        what="are refused by the chat template",
        level="warning",
        worse_above=0.01,
        reason="What the template refuses cannot be trained on.",
        fix="Mend the order of the roles in these items.",
    ),
    "text.replacement": Rule(
        noun="items",
        what="contain the replacement character �",
        level="info",
        worse_above=0.01,
        worse="warning",
        reason="The text was decoded wrongly before it came here, and models repeat what they see.",
        fix="Read the source again as UTF-8.",
    ),
    "roles.assistant_first": Rule(
        noun="items",
        what="begin with an assistant message",
        level="warning",
        worse_above=0.1,
        reason="Many chat templates refuse this; others train an answer to nothing.",
        fix="Remove the first message, or give it as a system message.",
    ),
    "roles.repeated": Rule(
        noun="items",
        what="have two messages of the same role in a row",
        level="warning",
        worse_above=0.1,
        reason="Many chat templates refuse this, others merge the turns or drop one.",
        fix="Join the two messages.",
    ),
    "roles.prompt_end": Rule(
        noun="items",
        what="have a prompt that does not end with a user or tool message",
        level="warning",
        worse_above=0.1,
        reason="Nobody asked: the answer continues the assistant's own words.",
        fix="Cut the prompt after its last user message.",
    ),
    "leakage.exact": Rule(
        noun="held-out items",
        what="have a prompt that also occurs in the training files",
        level="fatal",
        reason="Every number measured on them is about memory.",
        fix="Split by prompt (`kedge data split --by prompt`), or remove these prompts from the training files.",
    ),
    "leakage.near": Rule(
        noun="distinct held-out prompts",
        what="are near duplicates of a training prompt",
        level="warning",
        worse_above=0.1,
        reason="Rephrased prompts leak nearly as much as equal ones.",
        fix="Remove the near duplicates from the training files before splitting.",
    ),
    "contamination.prompts": Rule(
        noun="distinct evaluation prompts",
        what="also occur in the training files",
        level="warning",
        worse_above=0.01,
        reason="The evaluation then measures memory, and cannot be compared with the numbers of others.",
        fix="Remove these prompts from the training files.",
    ),
    "contamination.ngrams": Rule(
        noun="distinct evaluation prompts",
        what="share a run of 13 words (or a whole shorter prompt) with the training files",
        level="warning",
        worse_above=0.1,
        reason="The usual test of decontamination (GPT-3, Llama): long shared runs seldom are chance.",
        fix="Remove the overlapping training items, or report both numbers.",
    ),
    "contamination.items": Rule(
        noun="training items",
        what="share a run of 13 words (or a whole shorter prompt) with the evaluation files",
        level="info",
        worse_above=0.1,
        worse="warning",
        reason="These are the items to remove for a clean evaluation.",
        fix="Remove these items from the training files, or report both numbers.",
    ),
    "files.shared_prompts": Rule(
        noun="distinct prompts",
        what="also occur in the other file",
        level="info",
        reason="Prompts seen in SFT make reward and PPO look better on them; a split must know both files.",
        fix="Split all files by prompt with the same seed.",
    ),
    "files.shared_items": Rule(
        noun="distinct items",
        what="also occur in the other file",
        level="info",
        worse_above=0.01,
        worse="warning",
        reason="The same item in two files weighs double.",
        fix="Remove them from one of the files.",
    ),
    "files.contradictory": Rule(
        noun="distinct pairs in both files",
        what="are labelled the other way round in the other file",
        level="warning",
        worse_above=0.01,
        reason="The two labels cancel out, and no reward model can be right on both.",
        fix="Settle on one label, or remove them from both.",
    ),
}


def make_finding(
    code: str,
    *,
    count: int,
    total: int,
    places: Sequence[str] = (),
    file: str = "",
    detail: str = "",
    worse_above: float | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding of one rule: level `ok` when nothing offends.

    >>> make_finding("pairs.identical", count=3, total=40).message
    '3 of 40 pairs (7.5 %) have the same text on both sides.'
    >>> [make_finding("pairs.identical", count=count, total=40).level for count in (3, 0)]
    ['fatal', 'ok']
    """
    rule = RULES[code]
    share = count / total if total else 0.0
    limit = rule.worse_above if worse_above is None else worse_above
    level: Level = "ok" if not count else rule.worse if share > limit else rule.level
    message = f"{count:,} of {total:,} {rule.noun} ({_percent(share)}) {rule.what}{detail}."
    return Finding(
        level=level,
        code=code,
        message=message if count else f"{rule.passed or f'No {rule.noun} {rule.what} (of {total:,})'}.",
        where=", ".join(places[:3]) + (", …" if min(count, len(places)) > 3 else "") if places else file,
        fix=rule.fix if count else "",
        evidence={"file": file, "count": count, "total": total, "share": share, **(evidence or {})},
    )


def _percent(share: float) -> str:
    """A share in percent that is never rounded to 0: 1 in 100,000 reads '< 0.1 %'."""
    return "< 0.1 %" if 0 < share < 0.001 else f"{share * 100:.3g} %"
