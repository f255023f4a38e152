"""From two model folders to a verdict, a badcase and a promotion, as a user types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gate"))
from gate_files import binary, rows_of, write_exam

from kedge.core.files import hash_json
from kedge.models.loading.tiny import make_tiny

Kedge = Callable[..., Any]
SHORT = ("--max-new-tokens", "4", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that differ in their weights."""
    home = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("sft", "ppo")):
        make_tiny(home / name, seed=seed, hidden=32, layers=1)
    return home


@pytest.fixture
def home(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    for name in ("sft", "ppo"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def exam(home: Path, *, ppo: int, sft: int = 1200) -> Path:
    scores = {"sft": binary(sft, 2000), "ppo": binary(ppo, 2000)}
    (home / "gate.yaml").write_text("keep: {mmlu: 0.02}\n")
    return write_exam(home / "exams", rows_of("mmlu", "letter", scores))


def gate(kedge: Kedge, *more: str) -> Any:
    return kedge("gate", "ppo", "sft", "--from", "exams", *SHORT, *more)


def test_a_passing_verdict_lets_a_model_out(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1210)
    refused = kedge("promote", "ppo", "--as", "prod")
    assert refused.code == 3
    assert "no verdict for these weights" in refused.err

    decided = gate(kedge)
    assert decided.code == 0, decided.err
    assert "+0.50 [+0.30, +0.83]  low > -2.00  2,000  pass" in decided.out
    assert "verdict: pass for ppo" in decided.out
    verdict = json.loads((home / "verdict.json").read_text())
    assert verdict["candidate"]["weights"] != verdict["baseline"]["weights"]
    assert verdict["exams"] == {"mmlu": {"items_hash": "abc", "looks": 1}}
    assert verdict["rules"]["content"]["keep"] == {"mmlu": {"margin": 0.02, "by": None}}

    promoted = kedge("promote", "ppo", "--as", "prod")
    assert promoted.code == 0, promoted.err
    listed = kedge("promote", "--list")
    assert "prod" in listed.out
    assert "verdict pass" in listed.out
    assert kedge("promote", "sft", "--as", "prod").code == 3  # a verdict is for the weights of its candidate


def test_a_loss_ends_with_3_and_goes_out_by_an_override_that_stays(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1100)
    decided = gate(kedge)
    assert decided.code == 3
    assert "the gate says fail: mmlu" in decided.err
    refused = kedge("promote", "ppo", "--as", "prod")
    assert refused.code == 3
    assert "its verdict is fail (mmlu; verdict.json)" in refused.err
    assert kedge("promote", "ppo", "--as", "prod", "--override", "the client waits").code == 0
    assert "verdict fail" in (listed := kedge("promote", "--list").out)
    assert "OVERRIDE: the client waits" in listed


def test_undecided_blocks_unless_allowed_and_is_never_promoted(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1170)
    (home / "gate.yaml").write_text("keep: {mmlu: 0.015}\n")
    assert gate(kedge).code == 3
    allowed = gate(kedge, "--undecided", "allow", "--force")
    assert allowed.code == 0
    assert "the difference itself is near the margin" in allowed.out
    assert kedge("promote", "ppo", "--as", "prod").code == 3


def test_a_failing_badcase_blocks(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1210)
    rows = [
        {"id": "ppo-17-0", "model": "ppo", "prompt": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "5"}
    ]
    (home / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    add = ("badcase", "add", "answers.jsonl")
    near = kedge(*add, "ppo-17-1", "--why", "wrong", "--check", "number: 4")
    assert near.code == 2
    assert "did you mean 'ppo-17-0'?" in near.err
    assert "the bad answer passes this check" in kedge(*add, "ppo-17-0", "--why", "wrong", "--check", "contains: 5").err
    assert "(did you mean 'contains'?)" in kedge(*add, "ppo-17-0", "--why", "wrong", "--check", "contain: 4").err
    added = kedge(*add, "ppo-17-0", "--why", "agrees that 2+2=5", "--check", 'contains: "four is the answer"')
    assert added.code == 0, added.err
    assert kedge(*add, "ppo-17-0", "--why", "again", "--check", 'contains: "4"').code == 2
    case = added.out.partition(":")[0]

    replayed = kedge("badcase", "replay", "ppo", *SHORT)
    assert replayed.code == 3
    assert "0 of 3 samples are good, 3 are needed" in replayed.out
    assert "nobody knows what" in replayed.out
    decided = gate(kedge)
    assert decided.code == 3
    assert f"badcases.block: failed: {case}" in decided.out
    assert json.loads((home / "verdict.json").read_text())["badcases"]["results"][0]["verdict"] == "fail"

    assert kedge("badcase", "close", case, "--reason", "fixed in round 3").code == 0
    assert "fixed (fixed in round 3)" in kedge("badcase", "list").out
    assert gate(kedge, "--force").code == 3  # a fixed case is replayed for ever
    quarantined = ("badcase", "quarantine", case, "--reason", "ambiguous", "--until")
    assert kedge(*quarantined, "2001-01-01").code == 2
    assert kedge(*quarantined, "2999-01-01").code == 0
    again = gate(kedge, "--force")
    assert again.code == 0
    assert "1 in quarantine" in again.out


def test_a_changed_verdict_or_registry_is_noticed(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1100)
    assert gate(kedge).code == 3
    file = home / "verdict.json"
    file.write_text(file.read_text().replace('"fail"', '"pass"'))
    refused = kedge("promote", "ppo", "--as", "prod")
    assert refused.code == 2
    assert "verdict.json: changed after it was sealed" in refused.err
    assert kedge("promote", "ppo", "--as", "prod", "--override", "hurry").code == 0
    registry = home / "models/registry.jsonl"
    registry.write_text(registry.read_text().replace("hurry", "no hurry"))
    assert "registry.jsonl:1: this line was changed" in kedge("promote", "--list").err


def test_a_verdict_with_other_numbers_and_a_new_seal_is_decided_again(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1100)
    assert gate(kedge).code == 3
    file = home / "verdict.json"
    body = json.loads(file.read_text())
    del body["seal"]
    body["verdict"] = "pass"
    body["results"][0] |= {"verdict": "pass", "value": 0.0, "low": -0.01, "high": 0.01}
    file.write_text(json.dumps({**body, "seal": hash_json(body)}))
    refused = kedge("promote", "ppo", "--as", "prod")
    assert refused.code == 3
    assert "keep mmlu is pass in the verdict, and fail by the evidence" in refused.err


def test_evidence_that_was_changed_after_the_verdict_is_noticed(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1210)
    assert gate(kedge).code == 0
    exam(home, ppo=1100)
    refused = kedge("promote", "ppo", "--as", "prod")
    assert refused.code == 3
    assert "is not what the verdict was made from" in refused.err


def test_what_is_wrong_with_the_rules_is_told_with_its_line(kedge: Kedge, home: Path) -> None:
    exam(home, ppo=1210)
    (home / "gate.yaml").write_text("kep: {mmlu: 0.02}\nkeep:\n  mmlu: 2\nreplay: {block: some}\n")
    refused = gate(kedge)
    assert refused.code == 2
    assert "line 1: kep: not a setting here (did you mean 'keep'?)" in refused.err
    assert "line 3: keep.mmlu: must be less than 1, found 2" in refused.err
    assert "line 4: replay.block" in refused.err
    assert not (home / "verdict.json").exists()


def test_rules_to_start_from(kedge: Kedge, home: Path) -> None:
    assert kedge("gate", "--write-rules", "rules.yaml").code == 0
    assert kedge("gate", "--write-rules", "rules.yaml").code == 2
    exam(home, ppo=1210)
    missing = gate(kedge, "--rules", "rules.yaml")
    assert missing.code == 2
    assert "line 7: keep.gsm8k: no stage of `from` has the exam 'gsm8k'" in missing.err


def test_models_are_looked_for_by_name(kedge: Kedge, home: Path) -> None:
    scores = {"sft": binary(1200, 2000), "pppo": binary(1200, 2000)}
    exam(home, ppo=1200)
    write_exam(home / "exams", rows_of("mmlu", "letter", scores))
    missing = gate(kedge)
    assert missing.code == 2
    assert "the candidate has no item of mmlu.letter" in missing.err
    same = kedge("gate", "ppo", "ppo", "--from", "exams", *SHORT)
    assert same.code == 2
    assert "hold the same model" in same.err


def test_looks_are_counted_once_a_candidate(kedge: Kedge, home: Path, models: Path) -> None:
    exam(home, ppo=1210)
    for number in range(20):
        ledger = home / "models/looks.jsonl"
        if number:
            from kedge.gate.ledger import count_looks

            lines = [json.loads(line) for line in ledger.read_text().splitlines()]
            count_looks(
                ledger, lineage=lines[0]["lineage"], candidate=f"other-{number}", exams={"mmlu": "abc"}, part="all"
            )
        else:
            assert "look" not in gate(kedge).out
    assert "mmlu: this is look 20 of its lineage" in gate(kedge, "--force").out
