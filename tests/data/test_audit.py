"""Planted small files: each finding with its exact count, its level and its place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import ConfigError, DataError
from kedge.core.findings import Finding
from kedge.data.auditing import Audit, audit
from kedge.data.examples import Messages

Write = Callable[[str, Sequence[Any]], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Rows to a JSON Lines file; a string is written as it stands."""

    def _write(name: str, rows: Sequence[Any]) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return str(path)

    return _write


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def clean_pairs(count: int, *, tag: str = "") -> list[dict[str, str]]:
    """Pairs that nothing can be said against; who is longer alternates."""
    rng = random.Random(f"{tag}{count}")
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(5000)]
    rows = [pair(*(" ".join(rng.choices(words, k=30)) for _ in range(3))) for _ in range(count)]
    return [
        pair(row["prompt"], *sorted((row["chosen"], row["rejected"]), key=len, reverse=bool(number % 2)))
        for number, row in enumerate(rows)
    ]


def finding_of(result: Audit, code: str) -> Finding:
    finding = [item for item in result.findings if item.code == code]
    assert len(finding) == 1, [item.code for item in result.findings]
    return finding[0]


def counts(result: Audit) -> dict[str, int]:
    """Everything that was objected to."""
    return {item.code: item.evidence["count"] for item in result.findings if item.level != "ok"}


def test_clean_file_passes_every_check(write: Write) -> None:
    result = audit([write("clean.jsonl", clean_pairs(40))])
    assert counts(result) == {}
    assert not result.is_fatal
    assert (result.files[0].kind, result.files[0].items, result.files[0].prompts) == ("pairs", 40, 40)


def test_identical_pairs_forgive_only_white_space(write: Write) -> None:
    rows = clean_pairs(30)
    rows[4] = pair("p four", "same  text\n", " same text")
    rows[7] = pair("p seven", "Same text", "same text")
    result = audit([write("a.jsonl", rows)])
    finding = finding_of(result, "pairs.identical")
    assert (finding.evidence["count"], finding.evidence["total"], finding.level) == (1, 30, "fatal")
    assert finding.where.endswith("a.jsonl:5")
    assert (
        finding_of(audit([write("b.jsonl", [*rows, *clean_pairs(70, tag="b")])]), "pairs.identical").level == "warning"
    )


def test_pairs_that_differ_in_punctuation_alone_are_noise(write: Write) -> None:
    rows = [
        {"prompt": "Thanks!", "chosen": "You are welcome!", "rejected": "You are  welcome."},
        {"prompt": "Bye!", "chosen": "See you", "rejected": "see YOU"},
        {"prompt": "Count.", "chosen": "1, 2", "rejected": "1, 2, 3"},
        {"prompt": "Again.", "chosen": "Yes", "rejected": "Yes ........................"},
    ]
    finding = finding_of(audit([write("a.jsonl", [*rows, *clean_pairs(70, tag="b")])]), "pairs.same_words")
    assert (finding.level, finding.evidence["count"], finding.evidence["total"]) == ("warning", 2, 74)
    assert finding.where.endswith("a.jsonl:2")


def test_contradictions_count_every_pair_of_a_disputed_group(write: Write) -> None:
    rows = clean_pairs(20)
    rows += [pair("q", "yes", "no way"), pair("q", "no way", "yes"), pair("q", "yes", "no  way")]
    rows += [pair("r", "yes", "no way")]  # another prompt: no contradiction
    result = audit([write("a.jsonl", rows)])
    finding = finding_of(result, "pairs.contradictory")
    assert (finding.evidence["count"], finding.evidence["total"], finding.evidence["groups"]) == (3, 24, 1)
    offender = result.offenders_of(finding)[0]
    assert offender.where.endswith("a.jsonl:21")
    assert offender.also.endswith("a.jsonl:22")
    assert finding_of(result, "duplicates.exact").evidence["count"] == 1


def test_longer_wins_sets_ties_apart(write: Write) -> None:
    rows = [pair(f"p{n} {'x' * n}", "long answer" * 2, "short") for n in range(40)]
    rows += [pair(f"q{n} {'y' * n}", "short", "long answer") for n in range(10)]
    rows += [pair(f"r{n} {'z' * n}", "abc", "abd") for n in range(6)]
    result = audit([write("a.jsonl", rows)])
    wins = result.files[0].longer_wins
    assert wins is not None
    assert (wins.wins, wins.losses, wins.ties, wins.share) == (40, 10, 6, 0.8)
    # Wilson for 40 of 50, worked out by hand: (0.8 + 0.0384146 ± 1.959964·0.0684497) / 1.0768292
    assert (wins.low, wins.high) == pytest.approx((0.669629, 0.887562), rel=1e-5)
    assert finding_of(result, "pairs.longer_wins").level == "warning"


def test_shorter_wins_and_a_weak_preference(write: Write) -> None:
    rows = [pair(f"p {n}", "no", "a longer answer") for n in range(50)]
    finding = finding_of(audit([write("short.jsonl", rows)]), "pairs.shorter_wins")
    assert (finding.level, finding.evidence["count"]) == ("warning", 50)
    weak = [pair(f"p {n}", *(["longer", "no"] if n % 20 < 11 else ["no", "longer"])) for n in range(1000)]
    finding = finding_of(audit([write("weak.jsonl", weak)]), "pairs.longer_wins")
    assert (finding.level, finding.evidence["count"]) == ("info", 550)


def test_empty_sides_are_counted_apart(write: Write) -> None:
    rows = clean_pairs(12)
    rows[1] = pair("one", "", "x")
    rows[2] = pair("two", "x", " \n")
    rows[3] = pair("three", "y", "\t")
    result = audit([write("a.jsonl", rows)])
    assert finding_of(result, "empty.chosen").evidence["count"] == 1
    assert finding_of(result, "empty.rejected").evidence["count"] == 2
    assert finding_of(result, "empty.prompt").evidence["count"] == 0


def test_broken_lines_are_reported_and_fatal_above_the_limit(write: Write) -> None:
    path = write("a.jsonl", [*clean_pairs(18), "{not json", {"prompt": "x"}])
    result = audit([path])
    finding = finding_of(result, "reading.broken")
    assert (finding.level, finding.evidence["count"], finding.evidence["total"]) == ("fatal", 2, 20)
    assert "a.jsonl:19" in finding.where
    assert result.files[0].broken == 2
    assert finding_of(audit([path], max_broken=0.1), "reading.broken").level == "warning"


def test_a_file_without_a_single_item_is_fatal(write: Write) -> None:
    result = audit([write("a.jsonl", [{"prompt": "p", "chosen": "c", "rejected": "x", "margin": "wide"}])])
    assert counts(result) == {"reading.broken": 1, "reading.nothing": 1}
    assert result.is_fatal


def test_special_tokens_and_transcripts(write: Write) -> None:
    rows = clean_pairs(20)
    rows[2]["chosen"] += " <|im_end|> <|im_end|>"
    rows[5]["rejected"] += " </s>"
    rows[6]["prompt"] += " <turn>"
    rows[8]["chosen"] += "\n\nHuman: go on"
    path = write("a.jsonl", rows)
    finding = finding_of(audit([path]), "tokens.special")
    assert finding.evidence["count"] == 2
    assert finding.evidence["strings"] == {"<|im_end|>": 1, "</s>": 1}
    result = audit([path], special_tokens=["<turn>", "</s>"])
    assert finding_of(result, "tokens.model").evidence["strings"] == {"<turn>": 1, "</s>": 1}
    assert finding_of(result, "tokens.special").evidence["count"] == 1
    assert finding_of(result, "template.transcript").evidence["count"] == 1
    assert "Human:" in result.offenders_of(finding_of(result, "template.transcript"))[0].text


def test_roles_of_demonstrations(write: Write) -> None:
    rows = [talk(("user", f"question {n}"), ("assistant", f"answer {n} {'a' * n}")) for n in range(10)]
    rows.append(talk(("system", "be kind"), ("assistant", "hello there"), ("user", "hi"), ("assistant", "yes")))
    rows.append(talk(("user", "one"), ("user", "two"), ("assistant", "three")))
    rows.append(talk(("user", "run"), ("assistant", "call"), ("tool", "1"), ("tool", "2"), ("assistant", "done")))
    rows.append(talk(("user", "one"), ("assistant", "two"), ("user", "three")))
    result = audit([write("a.jsonl", rows)])
    assert finding_of(result, "roles.assistant_first").where.endswith("a.jsonl:11")
    assert finding_of(result, "roles.repeated").where.endswith("a.jsonl:12")
    assert finding_of(result, "roles.repeated").evidence["count"] == 1
    assert "a.jsonl:14" in finding_of(result, "reading.broken").where
    assert "end with the assistant" in finding_of(result, "reading.broken").where


def test_roles_of_prompts_and_answers(write: Write) -> None:
    def row(prompt: Sequence[str], answer: Sequence[str], tag: int) -> dict[str, Any]:
        return {
            "prompt": talk(*((role, f"{role} {tag} {'a' * tag}") for role in prompt))["messages"],
            "chosen": talk(*((role, f"good {tag}") for role in answer))["messages"],
            "rejected": "bad",
        }

    rows = [row(["user"], ["assistant"], n) for n in range(8)]
    rows += [row(["user", "assistant"], ["assistant"], 8), row(["user"], ["tool", "assistant"], 9)]
    rows += [row(["user"], ["assistant", "assistant"], 10), row(["system", "user"], ["assistant"], 11)]
    result = audit([write("a.jsonl", rows)])
    places = {code: finding_of(result, f"roles.{code}").where for code in ("prompt_end", "repeated")}
    assert places == {
        "prompt_end": f"{result.files[0].file}:9",
        "repeated": f"{result.files[0].file}:11",
    }
    assert finding_of(result, "roles.assistant_first").level == "ok"
    assert "a.jsonl:10" in finding_of(result, "reading.broken").where


def test_duplicates_of_items_and_prompts(write: Write) -> None:
    rows = [talk(("user", f"Tell me {'o' * n}"), ("assistant", f"fine {n}")) for n in range(1, 9)]
    rows += [rows[3], rows[3], talk(("user", "TELL  me oo"), ("assistant", "other"))]
    result = audit([write("a.jsonl", rows)])
    assert finding_of(result, "duplicates.exact").evidence["count"] == 2
    assert finding_of(result, "duplicates.prompts").evidence["count"] == 3
    assert (result.files[0].prompts, result.files[0].largest_prompt_group) == (8, 3)


def test_leakage_exact_is_fatal_and_near_is_a_warning(write: Write) -> None:
    train = clean_pairs(30)
    heldout_rows = clean_pairs(20, tag="held")
    heldout_rows[3]["prompt"] = train[8]["prompt"].upper()
    heldout_rows[4]["prompt"] = heldout_rows[3]["prompt"]
    heldout_rows[5]["prompt"] = train[9]["prompt"] + " indeed"
    result = audit([write("train.jsonl", train)], heldout=[write("held.jsonl", heldout_rows)])
    exact, near = finding_of(result, "leakage.exact"), finding_of(result, "leakage.near")
    assert (exact.level, exact.evidence["count"], exact.evidence["prompts"]) == ("fatal", 2, 1)
    assert (near.level, near.evidence["count"], near.evidence["total"]) == ("warning", 1, 19)
    offender = result.offenders_of(near)[0]
    assert offender.where.endswith("held.jsonl:6")
    assert offender.also.endswith("train.jsonl:10")
    assert result.files[1].part == "heldout"


def test_thirteen_words_in_common_are_contamination(write: Write) -> None:
    shared = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu"
    train = clean_pairs(20)
    train[2]["chosen"] += f" {shared.upper().replace(' ', ', ')}!"
    train[3]["rejected"] += " " + shared.rsplit(" ", 1)[0]  # only twelve of them
    train[4]["prompt"] = "What is love?"
    train[5]["chosen"] = "What is love?"  # a short text counts as a prompt only
    evaluation = [
        {"prompt": f"before {shared} after"},
        {"prompt": "what is LOVE"},
        {"prompt": "what is life"},
        {"prompt": "unrelated words only here"},
    ]
    result = audit([write("train.jsonl", train)], evaluation=[write("eval.jsonl", evaluation)])
    touched, items = finding_of(result, "contamination.ngrams"), finding_of(result, "contamination.items")
    assert (touched.evidence["count"], touched.evidence["total"], touched.level) == (2, 4, "fatal")
    assert items.evidence["count"] == 2
    assert items.where == f"{result.files[0].file}:3, {result.files[0].file}:5"
    assert finding_of(result, "contamination.prompts").evidence["count"] == 0


def test_boilerplate_of_an_evaluation_file_is_ignored(write: Write) -> None:
    frame = "below is a task that describes something write a response that completes the request"
    train = [{"prompt": f"{frame} one {'a' * n}"} for n in range(5)]
    for prompts, expected in ((10, 5), (11, 0)):
        evaluation = write(f"{prompts}.jsonl", [{"prompt": f"{frame} {'b' * n} tail"} for n in range(1, prompts + 1)])
        result = audit([write("train.jsonl", train)], evaluation=[evaluation])
        assert finding_of(result, "contamination.items").evidence["count"] == expected


def test_two_evaluation_files_are_counted_apart(write: Write) -> None:
    train = clean_pairs(10)
    first = [{"prompt": "nothing in common"}, {"prompt": train[0]["prompt"]}]
    second = [{"prompt": train[1]["prompt"]}, {"prompt": train[2]["prompt"]}, {"prompt": "also nothing"}]
    files = [write("first.jsonl", first), write("second.jsonl", second)]
    result = audit([write("train.jsonl", train)], evaluation=files)
    touched = {f.evidence["file"]: f.evidence["count"] for f in result.findings if f.code == "contamination.ngrams"}
    assert touched == {files[0]: 1, files[1]: 2}


def test_files_that_share_prompts_or_contradict_each_other(write: Write) -> None:
    one, other = clean_pairs(10), clean_pairs(8, tag="other")
    other[0] = pair(one[2]["prompt"], one[2]["rejected"], one[2]["chosen"])
    other[1] = one[4]
    result = audit([write("one.jsonl", one), write("other.jsonl", other)])
    assert finding_of(result, "files.shared_prompts").evidence["count"] == 2
    assert finding_of(result, "files.shared_items").evidence["count"] == 1
    clash = finding_of(result, "files.contradictory")
    assert (clash.evidence["count"], clash.evidence["total"]) == (1, 2)
    assert result.offenders_of(clash)[0].also.endswith("other.jsonl:1")


def test_tokens_and_window(write: Write) -> None:
    def measure(messages: Messages) -> int:
        if any("refuse" in message.content for message in messages):
            raise DataError("the template refuses this")
        return 2 + sum(len(message.content.split()) for message in messages)

    rows = [
        pair("a b c", "d e", "f"),
        pair("a " * 9, "d", "e f g h"),
        pair("w " * 10, "x", "y"),
        pair("refuse", "a", "b"),
    ]
    result = audit([write("a.jsonl", rows)], measure=measure, window=12)
    lengths = {(item.side, item.unit): item for item in result.files[0].lengths}
    assert (lengths["prompt", "tokens"].count, lengths["prompt", "tokens"].max) == (3, 12)
    assert (lengths["rejected", "tokens"].p50, lengths["rejected", "tokens"].max) == (1, 4)
    assert finding_of(result, "length.over_window").where.endswith("a.jsonl:2")
    assert finding_of(result, "length.prompt_over_window").where.endswith("a.jsonl:3")
    assert finding_of(result, "length.prompt_over_window").level == "fatal"
    assert finding_of(result, "template.refused").where.endswith("a.jsonl:4")


def test_percentiles_are_lengths_that_occur(write: Write) -> None:
    rows = [{"prompt": "x" * n} for n in range(1, 101)]
    prompt = audit([write("a.jsonl", rows)]).files[0].lengths[0]
    assert (prompt.p5, prompt.p50, prompt.p95, prompt.max, prompt.mean) == (5, 50, 95, 100, 50.5)
    assert prompt.unit == "characters"


def test_thumbs(write: Write) -> None:
    thumbs = [{"prompt": f"p{n} {'a' * n}", "completion": f"c {n}", "label": True} for n in range(6)]
    result = audit([write("one_sided.jsonl", thumbs)])
    assert finding_of(result, "thumbs.one_sided").evidence == {
        "file": result.files[0].file, "count": 6, "total": 6, "share": 1.0, "liked": 6, "disliked": 0
    }  # fmt: skip
    thumbs.append({**thumbs[2], "label": False})
    assert finding_of(audit([write("both.jsonl", thumbs)]), "thumbs.contradictory").evidence["count"] == 2


def test_rankings_count_their_strict_preferences(write: Write) -> None:
    rows = [
        {"prompt": "p", "answers": ["good", "fair", "bad one", "fair"], "rank": [1, 2, 3, 2]},
        {"prompt": "q", "answers": ["same", "other", "same"], "rank": [1, 2, 3]},
        {"prompt": "p", "answers": ["bad one", "good"], "rank": [1, 2]},
    ]
    result = audit([write("a.jsonl", rows)])
    # five preferences in the first (the two fair ones tie), three in the second, one in the third
    identical, clash = finding_of(result, "pairs.identical"), finding_of(result, "pairs.contradictory")
    assert (identical.evidence["count"], identical.evidence["total"]) == (1, 9)
    # good > bad one against bad one > good, and inside the second row same > other > same
    assert (clash.evidence["count"], clash.evidence["groups"]) == (4, 2)
    wins = result.files[0].longer_wins
    assert wins is not None
    # longer better: other > same, bad one > good; ties: good/fair twice, same/same; the rest shorter better
    assert (wins.wins, wins.losses, wins.ties) == (2, 4, 3)


def test_order_of_lines_and_files_changes_no_count(write: Write) -> None:
    rows = clean_pairs(60)
    rows += [pair(row["prompt"], row["rejected"], row["chosen"]) for row in rows[:5]]
    rows += [pair(row["prompt"] + " extra", "same", "same") for row in rows[5:12]]
    other = [*clean_pairs(20, tag="other"), *rows[:3]]
    shuffled = random.Random(4).sample(rows, len(rows))
    before = audit([write("a.jsonl", rows), write("b.jsonl", other)])
    after = audit([write("b.jsonl", other), write("a.jsonl", shuffled)])
    key = "file"

    def table(result: Audit) -> set[tuple[str, str, int, int]]:
        return {
            (
                item.code,
                " ".join(sorted(item.evidence[key].split(" and "))),
                item.evidence["count"],
                item.evidence["total"],
            )
            for item in result.findings
        }

    assert table(before) == table(after)
    assert {(f.code, f.level) for f in before.findings} >= {("duplicates.near_prompts", "warning")}


def test_result_is_json_and_progress_counts_items(write: Write) -> None:
    reported = list[int]()
    result = audit([write("a.jsonl", clean_pairs(2500))], progress=reported.append)
    assert reported == [1000, 2000, 2500]
    assert json.loads(json.dumps(result.as_dict()))["files"][0]["items"] == 2500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"near_threshold": 1.5}, "near_threshold is 1.5"),
        ({"window": 10}, "name one"),
        ({"window": 0, "measure": len}, "at least 1"),
    ],
)
def test_settings_are_checked(write: Write, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit([write("a.jsonl", clean_pairs(3))], **settings)


def test_no_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        audit([])
