"""A sealed verdict, changed in every way that somebody might try; the registry; the ledger; badcases on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import ConfigError, ContractStop, DataError
from kedge.core.files import hash_json
from kedge.exams import checks
from kedge.gate.badcases import Badcase, add_badcase, case_id, change_status, read_badcases
from kedge.gate.checks import Check, parse_check, passes
from kedge.gate.ledger import count_looks
from kedge.gate.registry import promote, promotions
from kedge.gate.replayed import Asked, CaseResult, replay_results, result_of
from kedge.gate.results import RuleResult
from kedge.gate.rules import ReplayRule
from kedge.gate.verdict import GatedModel, SealedVerdict, read_verdict, seal_verdict

PPO = GatedModel(name="ppo", path="runs/x/ppo/model", weights="w1", content="c1")
SFT = GatedModel(name="sft", path="runs/x/sft/model", weights="w0", content="c0")
KEEP = RuleResult(
    section="keep", metric="mmlu", verdict="fail", threshold=0.01, value=-0.03, low=-0.034, high=-0.026, items=14_042
)


def sealed(file: Path, result: RuleResult = KEEP, *, reserve: float = 0.0, part: Any = "all") -> SealedVerdict:
    content = {"keep": {}, "alpha": 0.05, "reserve": reserve}
    rules = {"file": "gate.yaml", "hash": "r", "content": content}
    return seal_verdict(
        file,
        candidate=PPO,
        baseline=SFT,
        results=[result],
        rules=rules,
        part=part,
        exams={"mmlu": {"items_hash": "abc", "looks": 1}},
        evidence={"gone.jsonl": "hash"},
        about={"sources": [], "judge": {}, "badcases": {}},
    )


def passing(low: float = -0.005) -> RuleResult:
    return RuleResult(
        section="keep", metric="mmlu", verdict="pass", threshold=0.01, value=0.0, low=low, high=0.005, items=14_042
    )


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.__setitem__(name, value)


def _set_rule(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["results"][0].update(fields)


def _both(body: dict[str, Any]) -> None:
    body["verdict"] = "pass"
    body["results"][0]["verdict"] = "pass"


CASES: dict[str, Callable[[dict[str, Any]], None]] = {
    "the verdict": _set("verdict", "pass"),
    "the weights": lambda body: body["candidate"].update(weights="w2", content="c2"),
    "a bound": _set_rule(low=-0.001),
    "a margin": _set_rule(threshold=0.5),
    "a rule taken out": _set("results", []),
    "the exam": _set("exams", {}),
    "the day": _set("created", "2001-01-01T00:00:00+00:00"),
    "verdict and rule": _both,
}


def attempt(folder: Path, change: Callable[[dict[str, Any]], None], *, is_resealed: bool) -> str | None:
    """Change a verdict; None where that is noticed, else what was believed."""
    file = folder / "verdict.json"
    sealed(file)
    body: dict[str, Any] = json.loads(file.read_text())
    del body["seal"]
    seal = hash_json(body)
    change(body)
    file.write_text(json.dumps({**body, "seal": hash_json(body) if is_resealed else seal}))
    try:
        return f"believed: {read_verdict(file).verdict}"
    except DataError:
        return None


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(tmp_path: Path, name: str) -> None:
    assert attempt(tmp_path, CASES[name], is_resealed=False) is None


@pytest.mark.parametrize("name", ["the verdict", "verdict and rule", "a rule taken out"])
def test_a_verdict_that_contradicts_itself_is_noticed_under_a_new_seal(tmp_path: Path, name: str) -> None:
    assert attempt(tmp_path, CASES[name], is_resealed=True) is None


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    verdict = sealed(tmp_path / "verdict.json", passing())
    assert verdict.verdict == "pass"
    assert verdict.results == (passing(),)
    assert read_verdict(tmp_path / "verdict.json") == verdict


def enter(registry: Path, model: GatedModel, *verdicts: tuple[Path, SealedVerdict], override: str = "") -> Any:
    return promote(registry, alias="prod", model=model, verdicts=verdicts, by="ada", override=override)


def test_only_the_latest_verdict_for_these_weights_counts(tmp_path: Path) -> None:
    registry, file = tmp_path / "models/registry.jsonl", tmp_path / "v.json"
    good = sealed(file, passing())
    with pytest.raises(ContractStop, match="no verdict for these weights"):
        enter(registry, SFT, (file, good))
    enter(registry, PPO, (file, good))
    with pytest.raises(ContractStop, match="its verdict is fail"):
        enter(registry, PPO, (file, sealed(tmp_path / "w.json")))
    assert [(entry.alias, entry.verdict, entry.override) for entry in promotions(registry)] == [("prod", "pass", "")]
    entry = enter(registry, PPO, override="because")
    assert (entry.verdict, entry.override, entry.by) == ("none", "because", "ada")


def test_items_that_are_kept_back_are_asked_for(tmp_path: Path) -> None:
    registry = tmp_path / "registry.jsonl"
    everyday = sealed(tmp_path / "a.json", passing(), reserve=0.5, part="open")
    with pytest.raises(ContractStop, match="kept for a promotion"):
        enter(registry, PPO, (tmp_path / "a.json", everyday))
    final = sealed(tmp_path / "b.json", passing(), reserve=0.5, part="reserved")
    assert enter(registry, PPO, (tmp_path / "a.json", everyday), (tmp_path / "b.json", final)).verdict == "pass"


@pytest.mark.parametrize("change", ["edit", "remove", "swap"])
def test_a_changed_registry_is_noticed(tmp_path: Path, change: str) -> None:
    registry = tmp_path / "registry.jsonl"
    for reason in ("one", "two", "three"):
        enter(registry, PPO, override=reason)
    lines = registry.read_text().splitlines(keepends=True)
    if change == "edit":
        lines[1] = lines[1].replace("two", "2")
    elif change == "remove":
        del lines[1]
    else:
        lines[1], lines[2] = lines[2], lines[1]
    registry.write_text("".join(lines))
    with pytest.raises(DataError, match=r"registry\.jsonl:2"):
        promotions(registry)
    with pytest.raises(DataError):
        enter(registry, PPO, override="four")


def test_a_look_is_a_candidate_not_a_computation(tmp_path: Path) -> None:
    ledger = tmp_path / "looks.jsonl"

    def look(candidate: str, *, lineage: str = "base", items: str = "abc", part: Any = "all") -> int:
        return count_looks(ledger, lineage=lineage, candidate=candidate, exams={"mmlu": items}, part=part)["mmlu"]

    assert [look("a"), look("a"), look("b"), look("b")] == [1, 1, 2, 2]
    assert [look("c", lineage="other"), look("c", items="new"), look("c", part="reserved")] == [1, 1, 1]
    assert look("c") == 3


def case(**fields: Any) -> Badcase:
    prompt = (("user", "What is 2 + 2?"),)
    return Badcase(**{
        "id": case_id(prompt, "5"), "prompt": prompt, "bad": "5", "why": "wrong", "check": Check(contains=["4"]),
        "severity": "block", "samples": 3, "needed": 2, **fields,
    })  # fmt: skip


def test_a_status_is_a_new_line(tmp_path: Path) -> None:
    file = add_badcase(tmp_path, case(siblings=("Two and two?",)))
    first = file.read_bytes()
    (stored,) = read_badcases(tmp_path)
    assert stored.prompts() == [(("user", "What is 2 + 2?"),), (("user", "Two and two?"),)]
    change_status(tmp_path, stored.id, "quarantined", reason="odd", until="2999-01-01", by="ada")
    assert file.read_bytes().startswith(first)
    (stored,) = read_badcases(tmp_path)
    assert (stored.status, stored.reason) == ("quarantined", "odd")
    assert not stored.counts(date(2998, 12, 31))
    assert stored.counts(date(2999, 1, 1))
    with pytest.raises(ConfigError, match="did you mean"):
        change_status(tmp_path, f"{stored.id}x", "fixed", reason="r", until="", by="ada")
    with pytest.raises(ConfigError, match="is a case already"):
        add_badcase(tmp_path, case())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"cases\.jsonl:2: not a badcase"),
        ('{"id": "case-x", "status": "fixed"}', r"cases\.jsonl:2: no case case-x above this line"),
        ('{"id": "a", "prompt": [{"role": "user", "content": "x"}]}', "not a badcase"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = add_badcase(tmp_path, case())
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(DataError, match=words):
        read_badcases(tmp_path)


CHECKS: list[tuple[dict[str, Any], str, bool]] = [
    ({"contains": "4"}, "It is 4.", True),
    ({"contains": ["four", "FIVE"]}, "Four, not five", True),
    ({"contains": "4"}, "It is five.", False),
    ({"lacks": "5"}, "It is 4.", True),
    ({"lacks": ["4", "5"]}, "It is 5.", False),
    ({"regex": r"\b4\b"}, "It is 4.", True),
    ({"number": 4}, "From 2 and 2 you get 4.0", True),
    ({"number": 4}, "From 4 you get 5", False),
    ({"refusal": "none"}, "It is 4.", True),
    ({"refusal": "full"}, "I'm sorry, but I cannot help with that.", True),
    ({"instruction": {"id": "punctuation:no_comma"}}, "one, two", False),
    ({"instruction": {"id": "punctuation:no_comma"}}, "one two", True),
]


def test_a_pattern_that_takes_too_long_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SECONDS", 0.02)
    assert passes(parse_check({"regex": r"^(a|aa)+$"}, where="--check"), "", "a" * 60 + "b") is False


@pytest.mark.parametrize(("check", "answer", "is_good"), CHECKS)
def test_checks_of_texts(check: dict[str, Any], answer: str, is_good: bool) -> None:
    assert passes(parse_check(check, where="--check"), "What is 2 + 2?", answer) is is_good


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({}, "one check, found none"),
        ({"contains": "4", "regex": "4"}, "one check, found contains, regex"),
        ({"regex": "("}, "not a regular expression"),
        ({"refusal": "never"}, "must be 'full', 'partial' or 'none'"),
        ({"instruction": {"id": "punctuation:no_coma"}}, r"did you mean 'punctuation:no_comma'\?"),
        ({"contain": "4"}, r"not a setting here \(did you mean 'contains'\?\)"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused(check: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_check(check, where="--check")


def asked(good: int, *, unknown: int = 0, is_trained_on: bool = False) -> Asked:
    return Asked(text="?", good=good, unknown=unknown, is_trained_on=is_trained_on)


@pytest.mark.parametrize(
    ("prompts", "verdict"),
    [
        ([asked(2)], "pass"),
        ([asked(1)], "fail"),
        ([asked(1, unknown=1)], "undecided"),
        ([asked(3), asked(1)], "fail"),
        ([asked(3, is_trained_on=True)], "undecided"),
        ([asked(3, is_trained_on=True), asked(1)], "fail"),
        ([asked(0, is_trained_on=True), asked(3)], "pass"),
    ],
)
def test_a_prompt_that_was_trained_on_counts_only_by_its_siblings(prompts: list[Asked], verdict: str) -> None:
    assert result_of(case(), prompts).verdict == verdict


@pytest.mark.parametrize(
    ("verdicts", "rule", "expected"),
    [
        (["pass", "pass"], {}, "pass"),
        (["pass", "fail"], {}, "fail"),
        (["pass", "undecided"], {}, "undecided"),
        (["pass", "fail"], {"block": 0.5}, "pass"),
        (["pass", "undecided"], {"block": 0.5}, "pass"),
        ([], {}, "pass"),
    ],
)
def test_shares_of_cases(verdicts: list[Any], rule: dict[str, Any], expected: str) -> None:
    cases = [
        CaseResult(id=str(number), severity="block", verdict=verdict, why="", reason="")
        for number, verdict in enumerate(verdicts)
    ]
    block, warn = replay_results(ReplayRule(**rule), cases, quarantined=0)
    assert (block.verdict, warn.verdict) == (expected, "pass")
