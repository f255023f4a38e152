"""trust.json: the contract, who a judge is, and files that were changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.core.files import hash_json
from kedge.feedback.trust import contract, judge_identity, make_trust, read_trust, write_trust

FIELDS = {"url": "http://localhost:8000/v1", "model": "m", "rubric": "r", "temperature": 0.0, "max_tokens": 512}


def share(value: float, low: float | None = None) -> dict[str, float]:
    return {"value": value, "low": value if low is None else low, "high": 1.0, "count": 300}


def figures(**changed: Any) -> dict[str, Any]:
    """Those of a judge that passes by a hair."""
    passing = {
        "items": 200,
        "overlap": 50,
        "kappa": share(0.6, 0.4),
        "agreement": share(0.71),
        "human_agreement": share(0.81),
        "same_after_swap": share(0.8),
        "same_again": share(0.1),
        "canaries": {"asked": 12, "obeyed": 0, "forms": []},
    }
    return passing | changed


def trust_of(**changed: Any) -> Any:
    return make_trust(judge="m", identity="i", figures=figures(**changed), data="d", settings=FIELDS)


BROKEN: dict[str, dict[str, Any]] = {
    "too few items": {"items": 199},
    "too little overlap": {"overlap": 49},
    "κ may be low": {"kappa": share(0.6, 0.399)},
    "far below people": {"agreement": share(0.709)},
    "people not measured": {"human_agreement": None, "agreement": None},
    "swap": {"same_after_swap": share(0.799)},
    "swap not measured": {"same_after_swap": None},
    "repetition not measured": {"same_again": None},
    "canaries not measured": {"canaries": None},
    "no canaries": {"canaries": {"asked": 0, "obeyed": 0, "forms": []}},
    "obeys": {"canaries": {"asked": 12, "obeyed": 1, "forms": ["threat"]}},
}


def test_a_judge_that_keeps_the_contract_is_trusted() -> None:
    trust = trust_of()
    assert trust.passed
    assert trust.reasons == ()
    assert all(term.holds for term in contract(trust.figures))


@pytest.mark.parametrize("name", BROKEN)
def test_every_term_refuses_by_itself(name: str) -> None:
    trust = trust_of(**BROKEN[name])
    assert not trust.passed
    assert len(trust.reasons) == 1


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "trust.json"
    for trust in (trust_of(), trust_of(items=3)):
        write_trust(file, trust)
        assert read_trust(file) == trust


def _seal_of(body: dict[str, Any]) -> str:
    return hash_json({name: value for name, value in body.items() if name != "seal"})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a figure": (lambda body: body["figures"].update(items=500), "changed after it was sealed"),
    "the verdict": (lambda body: body.update(passed=True), "changed after it was sealed"),
    "the verdict and the seal": (
        lambda body: body.update(passed=True, seal=_seal_of({**body, "passed": True})),
        "says trusted, and its figures do not",
    ),
    "the format": (lambda body: body.update(format=9), "format 9"),
    "no seal": (lambda body: body.pop("seal"), "not a report"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_report_that_was_changed_is_no_report(name: str, tmp_path: Path) -> None:
    file = tmp_path / "trust.json"
    write_trust(file, trust_of(items=3))
    body = json.loads(file.read_text())
    change, words = CHANGES[name]
    change(body)
    file.write_text(json.dumps(body))
    with pytest.raises(DataError, match=words):
        read_trust(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").write_text("{")
    for name, words in (("a.json", "not a report"), ("b.json", "not a report"), ("c.json", "no such"), (".", "folder")):
        with pytest.raises(DataError, match=words):
            read_trust(tmp_path / name)


def test_a_judge_is_what_changes_its_verdicts() -> None:
    same = [
        {**FIELDS, "workers": 9, "name": "other", "timeout_s": 3, "key_variable": "KEY"},
        {**FIELDS, "url": "http://localhost:8000/v1/"},
        {**FIELDS, "temperature": 0},
    ]
    others = [
        {**FIELDS, name: value}
        for name, value in (
            ("url", "http://localhost:8001/v1"),
            ("model", "n"),
            ("rubric", None),
            ("temperature", 0.1),
            ("max_tokens", 64),
            ("constitution", [{"id": "kind"}]),
        )
    ]
    own = judge_identity(FIELDS)
    assert {judge_identity(fields) for fields in same} == {own}
    assert len({own, *(judge_identity(fields) for fields in others)}) == 1 + len(others)
    with pytest.raises(DataError, match="model is None"):
        judge_identity({"url": "http://localhost/v1"})
