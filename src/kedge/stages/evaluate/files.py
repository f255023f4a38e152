"""What an evaluation leaves in its run: `answers.jsonl`, `pairs.jsonl` and `evaluation.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.core.files import write_json
from kedge.data.converting import to_fields
from kedge.data.examples import Message, Pair, Prompt
from kedge.data.writing import row_writer
from kedge.evaluate.answers import ModelAnswer, Preferences
from kedge.evaluate.evaluation import Evaluation
from kedge.stages.rl.answering import Answering


def write_answers(file: Path, answers: Sequence[ModelAnswer], prompts: Sequence[Prompt], *, seed: int) -> Path:
    """Every answer, a line each; the same prompts, seed and settings give it again."""
    with row_writer(file) as write:
        for one in answers:
            asked = prompts[one.prompt]
            write(
                {
                    "id": _id(one),
                    "model": one.model,
                    "prompt": [{"role": message.role, "content": message.content} for message in asked.prompt],
                    "answer": one.text,
                    "scores": dict(one.scores),
                    "kl": one.kl,
                    "length": len(one.tokens),
                    "finished": one.is_finished,
                    "seed": seed,
                    "origin": str(asked.origin),
                }
            )
    return file


def write_pairs(file: Path, found: Preferences, prompts: Sequence[Prompt]) -> Path:
    """The preferences in Kedge's own form of pairs; who said and scored what stands beside them."""
    with row_writer(file) as write:
        for better, worse in found.pairs:
            asked = prompts[better.prompt]
            sides = {"chosen": better, "rejected": worse}
            about = {
                f"{side}_{name}": value
                for side, one in sides.items()
                for name, value in (("id", _id(one)), ("model", one.model), ("score", one.scores["reward"]))
            }
            chosen, rejected = (Message("assistant", one.text) for one in sides.values())
            pair = Pair(prompt=asked.prompt, chosen=(chosen,), rejected=(rejected,), origin=asked.origin, extra=about)
            write(to_fields(pair))
    return file


def write_numbers(file: Path, evaluation: Evaluation, pairs: Preferences, asked: Answering) -> Path:
    about = {
        "answers_per_prompt": asked.answers,
        "sampling": asked.sampling.model_dump(mode="json"),
        "seed": asked.seed,
        "pairs": {"written": len(pairs.pairs), "ties": pairs.ties, "unpaired": pairs.unpaired},
    }
    write_json(file, evaluation.as_dict() | about)
    return file


def _id(one: ModelAnswer) -> str:
    return f"{one.model}-{one.prompt}-{one.number}"
