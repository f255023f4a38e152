"""Recipes with one fault each that can be known before training: `kedge check` must call each of them unfit, in words.

`attempt(case)` is None where it held, else one line about what went wrong.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from kedge.commands.check import check_recipe
from kedge.recipe.schema import load_recipe
from kedge.rewards import probe

HEAD = "kedge: 1\nname: a\nmodel: tiny\nstages:\n"
PROMPTS = [{"prompt": f"What is {n} plus {n + 1}?", "answer": str(2 * n + 1), "level": n % 3} for n in range(12)]
FUNCTIONS = """\
import os, sys, time

def good(answer, solution):
    return float(answer.text == solution)

def misses(answer, topic):
    return 1.0

def no_answer(text):
    return 1.0

def raises(answer):
    return 1.0 / len("")

def leaves(answer):
    sys.exit(0)

def kills(answer):
    os.kill(os.getpid(), 9)

def hangs(answer):
    while True:
        time.sleep(0.05)

def words(answer):
    return "good"

def too_few(answers):
    return [1.0]

def quits(answer):
    os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    reward: str
    """Of a PPO stage."""
    words: tuple[str, ...]
    """What a fatal finding must say."""
    more: str = ""
    """Other settings of the stage."""
    prompts: list[dict[str, object]] = field(default_factory=lambda: list[dict[str, object]](PROMPTS))
    functions: str = FUNCTIONS


def _function(name: str, *words: str, functions: str = FUNCTIONS, fault: str = "") -> Case:
    reward = f'{{kind: function, path: "mine.py:{name}"}}'
    return Case(name=f"function {fault or name}", reward=reward, words=words, functions=functions)


_UNTOLD: list[dict[str, object]] = [{"prompt": row["prompt"]} for row in PROMPTS]
_LONG: list[dict[str, object]] = [*PROMPTS[:5], {"prompt": "Say " + "a" * 700, "answer": "1", "level": 0}, *PROMPTS[5:]]
_EXACT = "{kind: exact}"


def gate(field: str) -> str:
    parts = '{right: {kind: exact}, words: {kind: regex, pattern: "[a-z]"}}'
    return f"{{kind: mix, how: gated, gate: right, risky: {field}, parts: {parts}}}"


CASES: tuple[Case, ...] = (
    Case(name="risky field unknown", reward=gate("leve"), words=("no prompt has the field 'leve'", "'level'")),
    Case(name="risky field no yes or no", reward=gate("level"), words=("field 'level' of a prompt is 0", "true or")),
    Case(
        name="no such file",
        reward='{kind: function, path: "my.py:good"}',
        words=("ppo.reward", "no file", "my.py"),
    ),
    _function("god", "has no function 'god' (did you mean 'good'?)"),
    _function("misses", "nothing fills its parameter `topic`", "level, solution"),
    _function("no_answer", "found parameters (text), expected `answers`"),
    _function("raises", "raised ZeroDivisionError", "mine.py, line 13"),
    _function("leaves", "ends the program: sys.exit(0)", "mine.py, line 16"),
    _function("kills", "killed its process with SIGKILL"),
    _function("hangs", "did not end within 2 s", "mine.py, line 23"),
    _function("words", "returned 'good' as the score of answer 1 of 2, a str; expected a number or None"),
    _function("too_few", "returned 1 scores for 2 answers"),
    _function("quits", "ended its process with exit code 0"),
    _function(
        "good",
        "mine.py cannot be imported: line 1: NameError",
        functions="undefined_name\n",
        fault="of an unknown name",
    ),
    _function(
        "good",
        "mine.py cannot be imported: line 2: SyntaxError",
        functions="x = 1\ndef good(:\n",
        fault="with a syntax error",
    ),
    Case(name="exact without answers", reward=_EXACT, words=("needs an `answer`", "12 of the 12"), prompts=_UNTOLD),
    Case(
        name="numeric without numbers",
        reward="{kind: numeric}",
        words=("an `answer` with a number", "no number in 'none'", "12 of the 12"),
        prompts=[{**row, "answer": "none"} for row in PROMPTS],
    ),
    Case(
        name="unit tests without tests",
        reward="{kind: unit_tests}",
        words=("tests in the field `tests`", "the prompt has no tests"),
    ),
    Case(
        name="a part of a mix",
        reward='{kind: mix, parts: {a: {kind: regex, pattern: x}, b: {kind: function, path: "mine.py:god"}}}',
        words=("ppo.reward.parts.b", "did you mean 'good'?"),
    ),
    Case(
        name="no server",
        reward="{kind: http, url: 'http://me:hidden@127.0.0.1:9/score?key=hidden'}",
        words=("http://***@127.0.0.1:9/score?key=*** was asked", "gave no score"),
    ),
    Case(
        name="no judge",
        reward="{kind: judge, url: 'http://127.0.0.1:9/v1', model: m}",
        words=("http://127.0.0.1:9/v1 was asked", "gave no score"),
    ),
    Case(name="no reward model", reward="./nothing", words=("ppo.reward", "nothing")),
    Case(
        name="one model to combine",
        reward="{kind: model, from: ./judge, combine: {kind: worst_case}}",
        words=("combine: worst_case was asked for", "is one reward model"),
    ),
    Case(name="a policy as reward model", reward="./policy", words=("is not a reward model but a LlamaForCausalLM",)),
    Case(
        name="a long prompt",
        reward=_EXACT,
        words=("1 of 13 prompts is longer than max_prompt_tokens 512", "prompts.jsonl:6"),
        prompts=_LONG,
    ),
    Case(
        name="no room for the answer",
        reward=_EXACT,
        words=("longer than the window of 1,024 less max_new_tokens 1,000, that is 24",),
        more="sampling: {max_new_tokens: 1000}",
    ),
    Case(
        name="a coefficient of 0",
        reward=_EXACT,
        words=("2 times 0, which is 0",),
        more="kl: {start: 0, limit: 5, on_limit: rollback}",
    ),
)


def write(case: Case, folder: Path) -> Path:
    """The recipe of a case with its files."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.prompts))
    (folder / "mine.py").write_text(case.functions)
    if "./policy" in case.reward:
        from kedge.models.loading.tiny import make_tiny

        make_tiny(folder / "policy")
    if "./judge" in case.reward:
        from kedge.models.loading.tiny import make_tiny
        from kedge.models.reward.reward_files import build, save

        save(build(make_tiny(), seed=1, dtype="float32"), folder / "judge")
    more = f", {case.more}" if case.more else ""
    recipe = folder / "a.yaml"
    recipe.write_text(f"{HEAD}  ppo: {{kind: ppo, reward: {case.reward}, prompts: prompts.jsonl, batch: 4{more}}}\n")
    return recipe


def attempt(case: Case) -> str | None:
    """Check the recipe of a case; None where it is refused with the words that it should be refused with."""
    limit_s = 2.0 if "hangs" in case.name else 60.0
    with tempfile.TemporaryDirectory() as place, patch.object(probe, "TIME_LIMIT_S", limit_s):
        report = check_recipe(load_recipe(write(case, Path(place))))
    fatal = [f"{finding.where}: {finding.message}" for finding in report.findings if finding.level == "fatal"]
    if not fatal:
        return f"{case.name}: called fit to run"
    told = "\n".join(fatal)
    missing = [text for text in case.words if text not in told]
    if missing:
        return f"{case.name}: {missing[0]!r} is not in {told!r}"
    return f"{case.name}: a secret is in {told!r}" if "hidden" in told else None
