"""What `kedge sample` does: which model and prompts are meant, and the answers as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from kedge.core.errors import ConfigError, ModelError
from kedge.data.examples import Message, Messages, Prompt
from kedge.data.reading import read
from kedge.data.writing import WRITABLE, row_writer
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl.answering import Answered


def find_model(place: str) -> str:
    """The model in the folder of a run or stage that made one; anything else (alias, model folder, hub id) as it is."""
    folder = Path(place)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return place
    if _is_language_model(folder / "model"):
        return str(folder / "model")
    stages = [stage for stage in sorted(folder.iterdir()) if _is_language_model(stage / "model")]
    if len(stages) == 1:
        return str(stages[0] / "model")
    if stages:
        raise ModelError(f"{place}: holds {len(stages)} models; name one: {', '.join(map(str, stages))}")
    raise ModelError(
        f"{place}: no language model here; expected a folder with config.json, or a run in which a stage has made one"
    )


def asked_prompts(texts: Sequence[str], file: str | None) -> list[Messages]:
    """Texts as a user's messages, then the prompts of a data file; one broken line of it is an error."""
    found: list[Messages] = [(Message("user", text),) for text in texts]
    if file is not None:
        found += [cast(Prompt, example).prompt for example in read(file, kind="prompts", max_broken=0.0)]
    if not found:
        raise ConfigError("nothing to answer: give --prompt TEXT (as often as you like), or --prompts FILE")
    return found


def sampling_from(values: Mapping[str, Any]) -> SamplingSettings:
    """Settings from the command line; what is wrong with them is told by option."""
    try:
        return SamplingSettings.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        told = [
            f"--{str(one['loc'][0]).replace('_', '-')}: {one['msg']}, found {one['input']!r}"
            for one in error.errors()
            if one["loc"]
        ]
        raise ConfigError("; ".join(told)) from error


def refuse_target(to: Path | None) -> None:
    """Refused now rather than after an hour of sampling."""
    if to is not None and not to.name.endswith(WRITABLE):
        raise ConfigError(f"--to {to}: the name must end in {', '.join(WRITABLE)}")


def rows_of(
    answered: Answered, prompts: Sequence[Messages], *, model: str, answers: int, seed: int
) -> Iterator[dict[str, Any]]:
    """A row an answer; the same model, prompts, settings and seed give it again."""
    said = zip(answered.tokens(), answered.texts(), answered.rollouts.finished_B.tolist(), strict=True)
    for row, (tokens, text, is_finished) in enumerate(said):
        prompt, number = divmod(row, answers)
        yield {
            "id": f"{prompt}-{number}",
            "model": model,
            "prompt": [{"role": message.role, "content": message.content} for message in prompts[prompt]],
            "answer": text,
            "length": len(tokens),
            "finished": is_finished,
            "seed": seed,
        }


def write_rows(to: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with row_writer(to) as write:
        for row in rows:
            write(row)


def _is_language_model(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    named: Sequence[str] = json.loads(config.read_text()).get("architectures") or ()
    return not any(name.endswith("ForSequenceClassification") for name in named)
