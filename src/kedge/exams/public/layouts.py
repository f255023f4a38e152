"""The layouts in which public exams are published, and how each becomes the normal form.

A layout names its files by patterns, which must each fit exactly one file (or, where it says so, several), and gives
the rows of the normal form.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import DataError
from kedge.exams.items import Row, read_rows

Rows = Iterator[Mapping[str, Any]]
Convert = Callable[[Sequence[Path]], Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`items` and `shots` are patterns of file names; `several` allows many files of a pattern."""

    name: str
    items: str
    convert: Convert
    shots: str | None = None
    beside: str | None = None
    """A second file that the items need, such as their labels; it comes last among the files."""
    several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """What is known of a public exam."""

    licence: str
    source: str
    layouts: tuple[Layout, ...]
    count: int | None = None
    """Items of the whole."""


def _as_is(files: Sequence[Path]) -> Rows:
    """JSON Lines that have the normal form already."""
    for file in files:
        yield from (row.fields for row in read_rows(file))


def _table(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a CSV file that has these columns; others are there too."""
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8-sig")
    reader = csv.DictReader(io.StringIO(text))
    if missing := [column for column in columns if column not in (reader.fieldnames or ())]:
        raise DataError(
            f"{file}: the column {', '.join(missing)} is missing; there are {', '.join(reader.fieldnames or ())}"
        )
    for fields in reader:
        yield Row(cast("dict[str, Any]", fields), f"{file}:{reader.line_num}")


def _mmlu_csv(files: Sequence[Path]) -> Rows:
    """A file a subject, without a header: question, four choices, the letter of the right one."""
    for file in files:
        subject, _, part = file.name.removesuffix(".csv").rpartition("_")
        with file.open(encoding="utf-8", newline="") as lines:
            for number, cells in enumerate(csv.reader(lines), start=1):
                if len(cells) != 6 or cells[5].strip() not in "ABCD":
                    raise DataError(f"{file}: row {number}: expected a question, 4 choices and a letter, found {cells}")
                question, *choices, letter = cells
                yield {
                    "id": f"{subject}/{part}/{number}",
                    "subject": subject,
                    "question": question,
                    "choices": choices,
                    "answer": "ABCD".index(letter.strip()),
                }


def _piqa(files: Sequence[Path]) -> Rows:
    items, labels = files
    rows, answers = read_rows(items), labels.read_text().split()
    if len(rows) != len(answers):
        raise DataError(f"{labels}: {len(answers):,} labels for the {len(rows):,} items of {items}")
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        choices = [row.text("sol1"), row.text("sol2")]
        yield {"id": str(number), "question": row.text("goal"), "choices": choices, "answer": int(answer)}


def _truthfulqa(files: Sequence[Path]) -> Rows:
    columns = ("Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers")
    for number, row in enumerate(_table(files[0], columns)):
        kind, category, question, best, correct, incorrect = (row.text(column).strip() for column in columns)
        yield {
            "id": str(number),
            "type": kind,
            "category": category,
            "question": question,
            "best": best,
            "correct": _split(correct),
            "incorrect": _split(incorrect),
        }


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _bbq(files: Sequence[Path]) -> Rows:
    for file in files:
        for row in read_rows(file):
            info, more = row.fields.get("answer_info"), row.fields.get("additional_metadata")
            if not isinstance(info, dict) or not isinstance(more, dict):
                raise row.problem("answer_info and additional_metadata", "objects", [info, more])
            places = ("ans0", "ans1", "ans2")
            yield {
                "id": f"{row.text('category')}/{row.text('example_id')}",
                "category": row.text("category"),
                "condition": row.text("context_condition"),
                "polarity": row.text("question_polarity"),
                "context": row.text("context"),
                "question": row.text("question"),
                "choices": [row.text(place) for place in places],
                "answer": row.number("label"),
                "groups": [info.get(place) for place in places],
                "stereotyped": more.get("stereotyped_groups"),
            }


def _xstest(files: Sequence[Path]) -> Rows:
    for number, row in enumerate(_table(files[0], ("prompt", "type")), start=1):
        label = "unsafe" if row.text("type").startswith("contrast_") else "safe"
        optional = {name: row.text(name) for name in ("focus", "note") if row.fields.get(name)}
        fields = {"id": row.fields.get("id") or str(number), "prompt": row.text("prompt"), "type": row.text("type")}
        yield {**fields, "label": row.fields.get("label") or label, **optional}


def _harmbench(files: Sequence[Path]) -> Rows:
    """Standard behaviours: those with a context or about copyright are graded in other ways."""
    for row in _table(files[0], ("Behavior", "FunctionalCategory", "SemanticCategory", "BehaviorID")):
        if row.text("FunctionalCategory") == "standard":
            yield {
                "id": row.text("BehaviorID"),
                "prompt": row.text("Behavior"),
                "functional": "standard",
                "semantic": row.text("SemanticCategory"),
            }


def _advbench(files: Sequence[Path]) -> Rows:
    """Requests alone: the strings that attacks aim at are left out."""
    for number, row in enumerate(_table(files[0], ("goal",)), start=1):
        yield {"id": f"advbench_{number}", "prompt": row.text("goal")}


def _numbered(files: Sequence[Path]) -> Rows:
    for number, row in enumerate(read_rows(files[0])):
        yield {"id": str(number), **row.fields}


def _caa(files: Sequence[Path]) -> Rows:
    for file in files:
        stem = file.name.partition(".")[0]
        yield from ({**row.fields, "id": f"{stem}/{row.text('id')}"} for row in read_rows(file))


def _caa_public(files: Sequence[Path]) -> Rows:
    for number, row in enumerate(_json_rows(files[0])):
        yield {
            "id": f"caa/{number}",
            "question": row.text("question"),
            "sycophantic": row.text("answer_matching_behavior"),
            "honest": row.text("answer_not_matching_behavior"),
        }


def _rm_bench(files: Sequence[Path]) -> Rows:
    for row in _json_rows(files[0]):
        fields = {name: row.fields.get(name) for name in ("prompt", "chosen", "rejected")}
        yield {"id": row.text("id"), **fields, "subset": row.text("domain", "all")}


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise DataError(f"{file}: expected a list of objects, found {type(values).__name__}")
    for number, fields in enumerate(cast("list[Any]", values)):
        if not isinstance(fields, dict):
            raise DataError(f"{file}: item {number}: expected an object, found {type(fields).__name__}")
        yield Row(cast("dict[str, Any]", fields), f"{file}: item {number}")


def _jsonl(name: str, stem: str, **more: Any) -> Layout:
    return Layout(name=name, items=f"{stem}.jsonl*", convert=more.pop("convert", _as_is), **more)


PUBLIC: Final[Mapping[str, Public]] = {
    "mmlu": Public(
        licence="MIT",
        source="hendrycks/test",
        count=14_042,
        layouts=(
            _jsonl("mmlu-test.jsonl and mmlu-dev.jsonl", "mmlu-test", shots="mmlu-dev.jsonl*"),
            Layout(
                name="CSV files of hendrycks/test: test/*_test.csv and dev/*_dev.csv",
                items="*_test.csv", shots="*_dev.csv", convert=_mmlu_csv, several=True,
            ),
        ),
    ),
    "piqa": Public(
        licence="AFL-3.0 (as its card states; the repository names none)",
        source="ybisk/ybisk.github.io, piqa",
        count=1_838,
        layouts=(
            _jsonl("piqa-valid.jsonl", "piqa-valid"),
            Layout(
                name="valid.jsonl with valid-labels.lst", items="valid.jsonl", beside="valid-labels.lst", convert=_piqa
            ),
        ),
    ),
    "truthfulqa": Public(
        licence="Apache-2.0",
        source="sylinrl/TruthfulQA",
        count=817,
        layouts=(
            _jsonl("truthfulqa.jsonl", "truthfulqa"),
            Layout(name="TruthfulQA.csv", items="TruthfulQA.csv", convert=_truthfulqa),
        ),
    ),
    "bbq": Public(
        licence="CC-BY-4.0",
        source="nyu-mll/BBQ",
        layouts=(
            _jsonl("bbq-*.jsonl", "bbq-*"),
            Layout(
                name="the files of nyu-mll/BBQ, data/*.jsonl, one a category",
                items="[A-Z]*.jsonl", convert=_bbq, several=True,
            ),
        ),
    ),
    "gsm8k": Public(
        licence="MIT",
        source="openai/grade-school-math",
        count=1_319,
        layouts=(
            _jsonl("gsm8k-test.jsonl", "gsm8k-test", convert=_numbered),
            Layout(name="test.jsonl of openai/grade-school-math", items="test.jsonl", convert=_numbered),
        ),
    ),
    "ifeval": Public(
        licence="Apache-2.0",
        source="google-research, instruction_following_eval",
        count=541,
        layouts=(
            _jsonl("ifeval.jsonl", "ifeval"),
            Layout(name="input_data.jsonl of IFEval", items="input_data.jsonl", convert=_as_is),
        ),
    ),
    "code": Public(
        licence="MIT",
        source="openai/human-eval",
        count=164,
        layouts=(_jsonl("HumanEval.jsonl", "HumanEval"),),
    ),
    "xstest": Public(
        licence="CC-BY-4.0",
        source="paul-rottger/exaggerated-safety",
        count=450,
        layouts=(
            _jsonl("xstest-prompts.jsonl", "xstest-prompts"),
            Layout(name="xstest_prompts.csv or xstest_v2_prompts.csv", items="xstest*prompts.csv", convert=_xstest),
        ),
    ),
    "harmbench": Public(
        licence="MIT",
        source="centerforaisafety/HarmBench",
        count=200,
        layouts=(
            _jsonl("harmbench-text.jsonl", "harmbench-text"),
            Layout(
                name="harmbench_behaviors_text_all.csv",
                items="harmbench_behaviors_text_all.csv", convert=_harmbench,
            ),
        ),
    ),
    "advbench": Public(
        licence="MIT",
        source="llm-attacks/llm-attacks",
        count=520,
        layouts=(
            _jsonl("advbench.jsonl", "advbench"),
            Layout(name="harmful_behaviors.csv of llm-attacks", items="harmful_behaviors.csv", convert=_advbench),
        ),
    ),
    "sycophancy": Public(
        licence="MIT; questions from anthropics/evals, CC-BY-4.0",
        source="nrimsky/CAA",
        layouts=(
            _jsonl("caa-*-ab.jsonl", "caa-*-ab", convert=_caa, several=True),
            Layout(name="test_dataset_ab.json of CAA", items="test_dataset_ab.json", convert=_caa_public),
        ),
    ),
    "reward_pairs": Public(
        licence="that of its source",
        source="the folder named",
        layouts=(
            _jsonl("reward-pairs.jsonl: prompt, chosen, rejected (or answers, best), subset", "reward-pairs",
                   convert=_numbered),
            Layout(name="total_dataset.json of RM-Bench", items="total_dataset.json", convert=_rm_bench),
        ),
    ),
    "diversity": Public(
        licence="that of its source",
        source="the folder named",
        layouts=(_jsonl("diversity.jsonl: id and prompt", "diversity"),),
    ),
}  # fmt: skip
"""By the name of the exam; what ships alone is not here."""
