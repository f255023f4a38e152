"""What an evaluation leaves in its run: `answers.jsonl`, `pairs.jsonl` and `evaluation.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kedge.core.files import write_json
from kedge.data.converting import to_fields
from kedge.data.examples import Message, Pair, Prompt
from kedge.data.writing import row_writer
from kedge.evaluate.answers import ModelAnswer, Preferences
from kedge.evaluate.evaluation import Evaluation, table_lines
from kedge.evaluate.groups import Groups, group_lines
from kedge.evaluate.judged import JudgedRates, as_dict, judged_lines
from kedge.stages.rl.answering import Answering


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that an evaluation finds."""

    evaluation: Evaluation
    judges: JudgedRates
    groups: Groups
    pairs: Preferences

    def lines(self) -> Iterator[str]:
        """The same as text."""
        yield from table_lines(self.evaluation)
        yield from judged_lines(self.judges, self.evaluation.baseline)
        yield from group_lines(self.groups)


def write_answers(file: Path, answers: Sequence[ModelAnswer], prompts: Sequence[Prompt], *, seed: int) -> Path:
    """Every answer, a line each; the same prompts, seed and settings give it again."""
    with row_writer(file) as write:
        for answer in answers:
            prompt = prompts[answer.prompt]
            write(
                {
                    "id": _id(answer),
                    "model": answer.model,
                    "prompt": [{"role": message.role, "content": message.content} for message in prompt.prompt],
                    "answer": answer.text,
                    "scores": dict(answer.scores),
                    "kl": answer.kl,
                    "length": len(answer.tokens),
                    "finished": answer.is_finished,
                    "seed": seed,
                    "origin": str(prompt.origin),
                }
            )
    return file


def write_pairs(file: Path, preferences: Preferences, prompts: Sequence[Prompt]) -> Path:
    """The preferences in Kedge's own form of pairs, with the models and scores of both answers."""
    with row_writer(file) as write:
        for better, worse in preferences.pairs:
            prompt = prompts[better.prompt]
            sides = {"chosen": better, "rejected": worse}
            about = {
                f"{side}_{name}": value
                for side, answer in sides.items()
                for name, value in (("id", _id(answer)), ("model", answer.model), ("score", answer.scores["reward"]))
            }
            chosen, rejected = (Message("assistant", answer.text) for answer in sides.values())
            pair = Pair(prompt=prompt.prompt, chosen=(chosen,), rejected=(rejected,), origin=prompt.origin, extra=about)
            write(to_fields(pair))
    return file


def write_numbers(file: Path, results: Results, request: Answering) -> Path:
    pairs = results.pairs
    found = results.evaluation.as_dict()
    if results.judges:
        found["judges"] = as_dict(results.judges)
    if results.groups:
        found["groups"] = {
            field: {value: group.as_dict() for value, group in by_value.items()}
            for field, by_value in results.groups.items()
        }
    about = {
        "answers_per_prompt": request.answers,
        "sampling": request.sampling.model_dump(mode="json"),
        "seed": request.seed,
        "pairs": {"written": len(pairs.pairs), "ties": pairs.ties, "unpaired": pairs.unpaired},
    }
    write_json(file, found | about)
    return file


def _id(answer: ModelAnswer) -> str:
    return f"{answer.model}-{answer.prompt}-{answer.number}"
