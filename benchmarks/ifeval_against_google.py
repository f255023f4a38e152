"""The instruction checkers of Kedge beside Google's own code, kind by kind, strict and loose.

    python benchmarks/ifeval_against_google.py DATA PYTHON [--answers KEY_ANSWER.jsonl ...]

DATA is a folder with capability/ifeval.jsonl.gz, agreement/pandalm.jsonl.gz and judge/auto-j-pairs.jsonl.gz; PYTHON an
environment of its own with lm-eval (its wheel alone), nltk, langdetect, immutabledict and packaging. Answers: those of
models in the two files of pairs, dealt to the 541 prompts (`dealt`), and the same bent by rules towards, or just
beside, what each prompt asks for (`bent`), so that every kind is followed often and narrowly missed often.
`--answers` adds files with the answers of other models, a `key` and an `answer` a line.

Not compared: sentences (nltk's trained data would be needed) and `letter_frequency` of a sign that is no letter
(Google's code draws a letter at random). Words in capitals are compared with nltk's tokenizer a line at a time, for
information.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kedge.core.instructions.checkers import INSTRUCTIONS, OPTIONS
from kedge.core.instructions.following import follows, follows_loosely

NOT_COMPARED = {"length_constraints:number_sentences"}
FOR_INFORMATION = {"change_case:capital_word_frequency"}
Rows = list[dict[str, Any]]

GOOGLE = r"""
import importlib.util, json, pathlib, sys, types
import nltk
nltk.download = lambda *a, **k: False  # nothing is fetched
import langdetect
langdetect.DetectorFactory.seed = 0
root = pathlib.Path(importlib.util.find_spec("lm_eval").origin).parent
for name, folder in (("lm_eval", ""), ("lm_eval.tasks", "tasks"), ("lm_eval.tasks.ifeval", "tasks/ifeval")):
    package = types.ModuleType(name)  # the package itself imports all of lm-eval
    package.__path__ = [str(root / folder)]
    sys.modules[name] = package
from lm_eval.tasks.ifeval import instructions_registry, instructions_util, utils
tokenizer = nltk.tokenize.NLTKWordTokenizer()
instructions_util.nltk.word_tokenize = lambda text: sum(map(tokenizer.tokenize, text.split("\n")), [])
instructions_util.count_sentences = lambda text: 0
for line in sys.stdin:
    order = json.loads(line)
    task = utils.InputExample(**order["task"])
    answer = order["answer"]
    strict = utils.test_instruction_following_strict(task, answer).follow_instruction_list
    loose = utils.test_instruction_following_loose(task, answer).follow_instruction_list
    print(json.dumps([list(map(bool, strict)), list(map(bool, loose))]), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--answers", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    tasks = read(args.data / "capability/ifeval.jsonl.gz")
    asked = [(name, task, answer) for name, task, answer in answer_sets(args.data, tasks, args.answers)]
    replies = ask_google(args.python, [(task, answer) for _, task, answer in asked])
    table: dict[str, list[int]] = defaultdict(lambda: [0] * 3)
    sets: dict[str, list[int]] = defaultdict(lambda: [0] * 2)
    for (name, task, answer), google in zip(asked, replies, strict=True):
        for kind, ours, theirs in verdicts(task, answer, google):
            table[kind] = [a + b for a, b in zip(table[kind], (1, theirs[0], ours == theirs), strict=True)]
            if kind in INSTRUCTIONS and kind not in NOT_COMPARED | FOR_INFORMATION:
                sets[name] = [a + b for a, b in zip(sets[name], (1, ours == theirs), strict=True)]
                if ours != theirs:
                    print(f"differs: {name} {task['key']} {kind}: ours {ours}, Google's {theirs}")
    show(table, sets)


def show(table: dict[str, list[int]], sets: dict[str, list[int]]) -> None:
    print(f"{'kind':<48}{'cases':>7}{'followed':>10}{'equal':>7}   strict and loose both")
    for kind in sorted(table):
        cases, followed, equal = table[kind]
        note = "  (not compared)" if kind not in INSTRUCTIONS or kind in NOT_COMPARED else ""
        note = "  (for information)" if kind in FOR_INFORMATION else note
        numbers = f"{'-':>10}{'-':>7}" if kind in NOT_COMPARED else f"{followed:>10}{equal:>7}"
        print(f"{kind:<48}{cases:>7}{numbers}{note}")
    for name, (cases, equal) in sets.items():
        print(f"{name}: {equal} of {cases} equal")
    print(f"all: {sum(equal for _, equal in sets.values())} of {sum(cases for cases, _ in sets.values())} equal")


def verdicts(
    task: dict[str, Any], answer: str, google: list[list[bool]]
) -> Iterator[tuple[str, tuple[bool, bool], tuple[bool, bool]]]:
    for number, (kind, kwargs) in enumerate(zip(task["instruction_id_list"], task["kwargs"], strict=True)):
        letter = str(kwargs.get("letter", "a"))
        shown = kind if re.fullmatch("[A-Za-z]", letter) else f"{kind} of a sign"
        ours = tuple(rule(kind, kwargs, task["prompt"], answer) for rule in (follows, follows_loosely))
        yield shown, (ours[0], ours[1]), (google[0][number], google[1][number])


def ask_google(python: Path, asked: Sequence[tuple[dict[str, Any], str]]) -> list[list[list[bool]]]:
    lines = [json.dumps({"task": task, "answer": answer}) for task, answer in asked]
    done = subprocess.run(
        [python, "-c", GOOGLE], input="\n".join(lines), capture_output=True, text=True, check=False, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


def read(file: Path) -> Rows:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def answer_sets(data: Path, tasks: Rows, files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any], str]]:
    for source in ("agreement/pandalm", "judge/auto-j-pairs"):
        texts = [
            text for row in read(data / f"{source}.jsonl.gz") for text in map(str, row["answers"]) if str(text).strip()
        ]
        rng = random.Random(source)
        rng.shuffle(texts)
        for number, task in enumerate(tasks):
            yield f"{source} dealt", task, texts[number]
            yield f"{source} bent", task, bent(task, texts[number], rng)
    by_key = {str(task["key"]): task for task in tasks}
    for file in files:
        for row in read(file):
            yield file.stem, by_key[str(row["key"])], row["answer"]


def bent(task: dict[str, Any], text: str, rng: random.Random) -> str:
    """The text after rules that make it follow each instruction, or come close to it, or leave it."""
    for kind, kwargs in zip(task["instruction_id_list"], task["kwargs"], strict=True):
        if rng.random() < 0.8:
            text = BENDS.get(kind, lambda text, kwargs, rng: text)(text, kwargs, rng)
    return "Sure, here it is:\n" + text if rng.random() < 0.2 else text


def near(count: int, rng: random.Random) -> int:
    return max(0, count + rng.choice((-1, 0, 0, 1)))


def words(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
    count = near(kwargs["num_words"], rng)
    every = (text.split() or ["word"]) * (count + 1)
    return " ".join(every[:count])


def letters(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
    letter = kwargs["letter"]
    bare = re.sub(re.escape(letter), "", text, flags=re.IGNORECASE)
    return f"{bare} {rng.choice((letter, letter.upper())) * near(kwargs['let_frequency'], rng)}"


def listed(mark: str) -> Callable[[str, dict[str, Any], random.Random], str]:
    def bend(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
        count = near(kwargs["num_bullets"], rng)
        return re.sub(r"(?m)^\s*[-*]", "", text) + "".join(
            f"\n{rng.choice((mark, '-', '  *', '**'))} point" for _ in range(count)
        )

    return bend


def first_word(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
    flat = " ".join(text.split())
    paragraphs = [flat] * near(kwargs["num_paragraphs"], rng)
    place = min(kwargs["nth_paragraph"], len(paragraphs)) - 1
    if paragraphs:
        start = rng.choice(
            (kwargs["first_word"], kwargs["first_word"].upper() + ",", f'"{kwargs["first_word"]}"', "So")
        )
        paragraphs[place] = f"{start} {flat}"
    return rng.choice(("\n\n", "\n\n", "\n\n\n", "\n\n\n\n")).join(paragraphs)


def sections(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
    mark = rng.choice((kwargs["section_spliter"], kwargs["section_spliter"].lower()))
    return "\n".join(
        f"{mark}{rng.choice((' ', '', '  '))}{number + 1}\n{text}"
        for number in range(near(kwargs["num_sections"], rng))
    )


def divided(text: str, kwargs: dict[str, Any], rng: random.Random) -> str:
    parts = [text.replace("*", "")] * max(1, near(kwargs["num_paragraphs"], rng))
    edge = rng.choice(("", "", "***\n", "\n***", "***\n\n***\n"))
    joined = rng.choice(("\n***\n", "***", "\n\n***\n\n")).join(parts)
    return edge + joined if edge.endswith("\n") else joined + edge


BENDS: dict[str, Callable[[str, dict[str, Any], random.Random], str]] = {
    "punctuation:no_comma": lambda text, kwargs, rng: text.replace(",", rng.choice(("", "", "，"))),
    "detectable_format:number_highlighted_sections": lambda text, kwargs, rng: (
        text.replace("*", "")
        + "".join(
            rng.choice(("\n*part*", " **part**", "\n* *", "\n*a\nb*"))
            for _ in range(near(kwargs["num_highlights"], rng))
        )
    ),
    "length_constraints:number_words": words,
    "detectable_content:number_placeholders": lambda text, kwargs, rng: (
        re.sub(r"[\[\]]", "", text)
        + "".join(rng.choice((" [name]", " [a b]", " [x\ny]")) for _ in range(near(kwargs["num_placeholders"], rng)))
    ),
    "combination:repeat_prompt": lambda text, kwargs, rng: (
        rng.choice(("", " ", "> "))
        + rng.choice((kwargs["prompt_to_repeat"], kwargs["prompt_to_repeat"].upper()))
        + "\n"
        + text
    ),
    "detectable_format:title": lambda text, kwargs, rng: (
        rng.choice(("<<title>>", "<< >>", "<<a\nb>>", "<<<t>>>", "<<>>")) + "\n" + text
    ),
    "change_case:english_lowercase": lambda text, kwargs, rng: text.lower(),
    "change_case:english_capital": lambda text, kwargs, rng: text.upper(),
    "detectable_format:number_bullet_lists": listed("*"),
    "detectable_format:multiple_sections": sections,
    "startend:quotation": lambda text, kwargs, rng: rng.choice(('"{}"', ' "{}"\n', "“{}”", '"{}')).format(text),
    "keywords:existence": lambda text, kwargs, rng: (
        f"{text} {' '.join(kwargs['keywords'][rng.choice((0, 0, 1)) :]).title()}"
    ),
    "detectable_format:json_format": lambda text, kwargs, rng: rng.choice(
        ("{}", "```json\n{}\n```", "```\n{}\n```", "JSON: {}")
    ).format(json.dumps({"answer": text})),
    "length_constraints:number_paragraphs": divided,
    "combination:two_responses": lambda text, kwargs, rng: rng.choice(
        ("{0}\n******\n{1}", "{0}******{0}", "******{0}******{1}", "{0}******{1}******{0}", "{0}\n*****\n{1}")
    ).format(text, text[::-1]),
    "keywords:letter_frequency": letters,
    "startend:end_checker": lambda text, kwargs, rng: (
        text + "\n" + kwargs["end_phrase"] + rng.choice(("", " ", '"', ".", " Thanks"))
    ),
    "keywords:forbidden_words": lambda text, kwargs, rng: (
        text
        + " "
        + rng.choice(
            (
                "",
                kwargs["forbidden_words"][0],
                kwargs["forbidden_words"][-1] + "s",
                kwargs["forbidden_words"][0].upper() + "!",
            )
        )
    ),
    "keywords:frequency": lambda text, kwargs, rng: (
        f"{text} {(kwargs['keyword'] + rng.choice(('', 's', '.')) + ' ') * near(kwargs['frequency'], rng)}"
    ),
    "detectable_content:postscript": lambda text, kwargs, rng: (
        f"{text}\n{rng.choice((kwargs['postscript_marker'], 'p. s. ', 'P.P. S', 'PS', 'P. P.S.'))} more"
    ),
    "length_constraints:nth_paragraph_first_word": first_word,
    "detectable_format:constrained_response": lambda text, kwargs, rng: rng.choice(
        (*OPTIONS, OPTIONS[0].lower(), f"Well. {OPTIONS[1]}\n{text}")
    ),
    "change_case:capital_word_frequency": lambda text, kwargs, rng: (
        f"{text.lower()} {' '.join((['NOW', 'YES-NO', 'I'] * 99)[: near(kwargs['capital_frequency'], rng)])}"
    ),
    "language:response_language": lambda text, kwargs, rng: (
        SENTENCES.get(kwargs["language"], "12345") if rng.random() < 0.8 else text
    ),
}
SENTENCES = {
    "de": "Das ist ein kurzer Satz über den Regen im Herbst.",
    "fr": "Ceci est une courte phrase sur la pluie en automne.",
    "es": "Esta es una frase corta sobre la lluvia de otoño.",
    "it": "Questa è una breve frase sulla pioggia in autunno.",
    "pt": "Esta é uma frase curta sobre a chuva de outono.",
    "ru": "Это короткое предложение об осеннем дожде.",
    "bg": "Това е кратко изречение за есенния дъжд.",
    "hi": "यह शरद ऋतु की बारिश के बारे में एक छोटा वाक्य है।",
    "ar": "هذه جملة قصيرة عن المطر في الخريف.",
    "fa": "این یک جمله کوتاه درباره باران پاییزی است.",
    "ur": "یہ خزاں کی بارش کے بارے میں ایک چھوٹا سا جملہ ہے۔",
    "vi": "Đây là một câu ngắn về cơn mưa mùa thu.",
    "ko": "이것은 가을비에 대한 짧은 문장입니다.",
    "th": "นี่คือประโยคสั้นๆ เกี่ยวกับฝนในฤดูใบไม้ร่วง",
    "fi": "Tämä on lyhyt lause syksyn sateesta.",
    "sw": "Hii ni sentensi fupi kuhusu mvua ya vuli.",
}


if __name__ == "__main__":
    main()
