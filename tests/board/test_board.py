"""The board: numbers against values worked out by hand, who is compared with whom, what is said of broken files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import board_attacks
import pytest
from board_files import fill_evaluation, fill_exam, gated, hashes, make_runs, mixed, seal, stage
from gate_files import rows_of

from kedge.commands.board.command import BoardRequest, board_lines, make_board, write_board
from kedge.commands.board.lost import MOST
from kedge.commands.gate import add_case
from kedge.core.errors import ConfigError
from kedge.core.files import hash_json
from kedge.exams.items import hash_of_text
from kedge.exams.rows import write_rows
from kedge.gate.badcases import read_badcases
from kedge.gate.registry import promote
from kedge.report.board.records import Board, Cell


def board_of(*paths: Path, baseline: str | None = None) -> Board:
    home = paths[0].parent
    return make_board(
        BoardRequest(paths=paths, baseline=baseline, registry=home / "registry.jsonl", badcases=home / "badcases")
    )


def cell(board: Board, model: str, title: str, metric: str | None = None) -> Cell:
    row = [model.label for model in board.models].index(model)
    places = [
        place
        for place, column in enumerate(board.columns)
        if column.title == title and (metric is None or column.metric == metric)
    ]
    found = board.cells[row][places[0]]
    assert found is not None
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_runs(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def board(runs: list[Path]) -> Board:
    return board_of(*runs)


def test_rows_are_models_in_the_order_of_stages_and_one_model_is_one_row(board: Board) -> None:
    assert [model.label for model in board.models] == ["sft", "dpo", "ppo"]
    assert [model.is_baseline for model in board.models] == [True, False, False]
    assert [model.weights for model in board.models] == ["sft-weights", "dpo-weights", "ppo-weights"]
    assert [column.topic for column in board.columns if column.is_main] == [
        "preference", "preference", "capability", "safety",
    ]  # fmt: skip
    assert [column.metric for column in board.columns if not column.is_main] == ["cloze"]


def test_differences_are_paired_and_adjusted_over_the_page(board: Board) -> None:
    # Of 100 items dpo gained 2 and lost 14: p = 2 (1 + 16 + 120) / 2^16. Holm: the fifth smallest of 8, times 4.
    mmlu = cell(board, "dpo", "mmlu", "letter")
    assert (mmlu.value, mmlu.items) == (0.6, 100)
    assert mmlu.difference is not None
    assert mmlu.difference.value == pytest.approx(-0.12)
    assert mmlu.difference.p_value == pytest.approx(274 / 65536)
    assert board.comparisons == 8
    assert mmlu.difference.adjusted == pytest.approx(4 * 274 / 65536)
    assert mmlu.difference.change(0.05) == "worse"
    undecided = cell(board, "ppo", "mmlu").difference
    assert undecided is not None
    assert (undecided.p_value, undecided.change(0.05)) == (0.5, "undecided")  # 2 gained, none lost


def test_less_can_be_better(board: Board) -> None:
    # ppo complied with none of the 40 prompts, sft with 22: 22 heads in a row.
    safety = cell(board, "ppo", "safety")
    assert safety.value == 0.0
    assert safety.difference is not None
    assert safety.difference.value == pytest.approx(22 / 40)
    assert safety.difference.p_value == pytest.approx(2 / 2**22)
    assert safety.difference.change(0.05) == "better"


def test_the_page_says_what_the_numbers_say(board: Board, tmp_path: Path) -> None:
    page = write_board(board, tmp_path / "board.html").read_text()
    rows = re.findall(r"<tr(?: class=\"baseline\")?><th scope=\"row\".*?</tr>", page, flags=re.DOTALL)
    dpo, ppo = rows[1], rows[2]
    assert "60.0" in dpo
    assert re.search(r"change worse\">▼ worse", dpo)
    assert re.search(r"change better\">▼ better", ppo)  # less of it, and less is better
    assert 'change undecided">undecided' in ppo
    assert "100 items, items_hash abc" in dpo
    assert "better than sft by −12.00 points [−20.52 points, −4.78 points] on 100 items of both" in dpo
    assert "over all 8 comparisons" in page
    assert "default-src &#39;none&#39;" not in page
    assert "content=\"default-src 'none'; script-src 'nonce-" in page


def test_the_tax_is_the_worst_of_what_is_kept(board: Board) -> None:
    dpo, ppo = board.tax
    assert (board.tax_source, board.kept) == ("gold", ("mmlu.letter", "safety.complied"))
    assert (dpo.label, dpo.exam, round(dpo.loss.value, 4), dpo.gain.value) == ("dpo", "mmlu.letter", -0.12, 0.775)
    assert (ppo.label, ppo.exam, round(ppo.loss.value, 4), ppo.gain.value) == ("ppo", "mmlu.letter", 0.02, 0.55)


def test_models_that_met_are_ranked(board: Board) -> None:
    gold, reward = board.leagues
    assert (gold.source, gold.matches, gold.prompts) == ("gold", 120, 40)  # the same answers twice count once
    assert gold.wins["dpo", "sft"] == (0.775, 40)  # 30 wins and 2 ties of 40
    assert gold.wins["sft", "dpo"] == (pytest.approx(0.225), 40)
    assert sum(row.strength for row in gold.standings) == pytest.approx(0)
    assert [(row.label, row.places) for row in reward.standings] == [("ppo", (1, 1)), ("dpo", (2, 2)), ("sft", (3, 3))]
    assert [point.label for point in board.proxies[0]] == ["sft", "dpo", "ppo"]
    assert [round(point.gold.value, 3) for point in board.proxies[0]] == [0.0, 0.55, 0.6]


def test_answers_to_the_same_prompts_are_compared_across_runs(tmp_path: Path) -> None:
    judge = {"gold": {"kind": "stub"}}
    for run, model, wins in (("one", "dpo", 14), ("two", "ppo", 8)):
        folder = stage(tmp_path / run, "eval", "evaluate", models=["sft", model], **judge)
        fill_evaluation(folder, {"gold": {"sft": [0.0] * 20, model: [1.0] * wins + [-1.0] * (20 - wins)}}, "sft")
    (league,) = board_of(tmp_path / "one", tmp_path / "two").leagues
    assert league.wins["dpo", "ppo"] == (0.65, 20)  # 6 that only dpo wins, 14 ties
    other = stage(tmp_path / "three", "eval", "evaluate", models=["sft", "new"], gold={"kind": "another"})
    fill_evaluation(other, {"gold": {"sft": [0.0] * 20, "new": [1.0] * 20}}, "sft")
    board = board_of(tmp_path / "one", tmp_path / "two", tmp_path / "three")
    assert [len(league.models) for league in board.leagues] == [3]  # another judge is another league
    assert len(board.columns) == 2


def test_judges_that_compare_count_as_they_said(tmp_path: Path) -> None:
    folder = stage(tmp_path / "one", "eval", "evaluate", models=["sft", "dpo"], judge={"url": "x"})
    fill_evaluation(folder, {"reward": {"sft": [0.0] * 10, "dpo": [1.0] * 10}}, "sft")
    orders = [(1.0, 1.0)] * 7 + [(1.0, 0.0)] * 2 + [(0.0, 0.0)]  # 7 wins, 2 that contradict themselves, a loss
    lines = [
        {"judge": judge, "model": "dpo", "prompt": prompt, "as_first": first, "as_second": second, "length": 5,
         "baseline_length": 5}
        for judge in ("ann", "bob")
        for prompt, (first, second) in enumerate(orders)
    ]  # fmt: skip
    (folder / "judgements.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    board = board_of(tmp_path / "one")
    titles = [column.title for column in board.columns]
    assert titles == ["wins by majority", "wins by ann", "wins by bob", "wins by reward"]
    assert cell(board, "dpo", "wins by ann").value == pytest.approx(0.8)
    (folder / "judgements.jsonl").write_text("{}\n")
    assert "not a comparison of an evaluate stage" in board_of(tmp_path / "one", folder).problems[0]


def test_groups_show_what_hides_in_a_mean(board: Board) -> None:
    (table,) = board.groups
    assert (table.field, [row.value for row in table.rows]) == ("language", ["de", "en"])
    dpo = table.rows[0].cells[1]
    assert dpo is not None
    assert dpo.difference is not None
    assert (dpo.items, dpo.value, dpo.difference.value) == (50, 0.6, pytest.approx(-0.12))  # 1 gained, 7 lost
    assert dpo.difference.p_value == pytest.approx(2 * 9 / 256)


def test_items_that_were_lost_make_badcases(board: Board, tmp_path: Path) -> None:
    assert board.lost.count == 15  # 14 of mmlu, and one prompt of safety that dpo complied with and sft did not
    item = board.lost.items[0]
    assert (item.model, item.column, item.baseline_score, item.score) == ("dpo", "mmlu.letter", 1.0, 0.0)
    assert item.answer.startswith("wrong answer of dpo")
    assert item.baseline_answer.startswith("right answer of sft")
    words = re.fullmatch(r"kedge badcase add (\S+) (\S+) --why .*", item.command)
    assert words is not None
    case, _ = add_case(
        tmp_path, Path(words[1]), words[2], why="wrong", check='lacks: "wrong"', severity="block", samples=1,
        needed=None, siblings=(),
    )  # fmt: skip
    assert case.bad == item.answer


def test_a_choice_is_shown_as_it_was_graded(tmp_path: Path) -> None:
    """The likeliest choice as a whole may be another than the one that is likeliest by its length."""
    graded = {"sft": "a long right one", "dpo": "wrong"}
    rows = [
        replace(row, answer=hash_of_text(graded[row.model]))
        for row in rows_of("piqa", "cloze", {"sft": [1.0, 1.0], "dpo": [0.0, 1.0]})
    ]
    folder = fill_exam(tmp_path / "exams", rows, {f"answer {model} piqa-0": "wrong" for model in graded})
    answers = [json.loads(line) | {"choices": ["wrong", "a long right one"]} for line in _lines(folder)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (item,) = board_of(folder).lost.items
    assert (item.baseline_answer, item.answer) == ("a long right one", "wrong")
    assert item.choices == ("wrong", "a long right one")
    assert item.command
    graded["dpo"] = "a long right one"  # which the row does not have as its answer: nobody wrote it
    rows = [replace(row, answer=hash_of_text(graded[row.model])) for row in rows]
    write_rows(folder / "items.jsonl", rows)
    (item,) = board_of(folder).lost.items
    assert (item.answer, item.command) == ("a long right one", "")
    assert "which nobody wrote" in item.problem


def _lines(folder: Path) -> list[str]:
    return (folder / "answers.jsonl").read_text().splitlines()


def test_a_page_has_room_for_some_of_every_kind(tmp_path: Path) -> None:
    many, few = mixed(0, 0, 900, 100), mixed(0, 0, 3, 997)
    rows = [
        *rows_of("mmlu", "letter", {"sft": many[0], "dpo": many[1]}),
        *rows_of("piqa", "letter", {"sft": few[0], "dpo": few[1]}),
    ]
    lost = board_of(fill_exam(tmp_path / "exams", rows)).lost
    assert (lost.count, len(lost.items)) == (903, MOST)
    assert sum(item.column == "piqa.letter" for item in lost.items) == 3


def test_models_that_answered_other_items_are_not_compared(tmp_path: Path) -> None:
    sft, dpo = mixed(50, 0, 50, 0)
    first = fill_exam(tmp_path / "one", rows_of("mmlu", "letter", {"sft": sft}))
    second = fill_exam(tmp_path / "two", rows_of("mmlu", "letter", {"dpo": dpo}), items_hash="other")
    board = board_of(first, second, baseline="sft")
    assert board.comparisons == 0
    assert any("answered other items are not compared" in note for note in board.notes)
    titles = [column.title for column in board.columns]
    assert len(set(titles)) == 2
    note = cell(board, "dpo", titles[1])
    assert (note.difference, note.note) == (None, "not compared: sft has not answered these items")
    assert "dpo: not compared" in list(board_lines(board))


def test_the_same_weights_are_one_model_whatever_they_are_called(tmp_path: Path) -> None:
    sft, dpo = mixed(50, 0, 20, 30)
    run = tmp_path / "run"
    stage(run, "sft", "sft", makes="sft")
    fill_exam(stage(run, "exam", "exam", models=["sft"]), rows_of("mmlu", "letter", {"sft": sft}))
    other = fill_exam(tmp_path / "exams", rows_of("mmlu", "letter", {"base": sft, "new": dpo}))
    about = json.loads((other / "exam.json").read_text())
    about["weights"]["base"] = hashes("sft")[1]
    (other / "exam.json").write_text(json.dumps(about))
    board = board_of(run, other)
    assert [model.label for model in board.models] == ["sft", "new"]


def test_a_verdict_shows_the_rules_that_decided(board: Board) -> None:
    (card,) = board.verdicts
    assert (card.verdict, card.candidate, card.baseline) == ("undecided", "dpo", "sft")
    (deciding,) = [rule for rule in card.rules if rule.is_deciding]
    assert (deciding.name, deciding.value, deciding.needs) == ("mmlu", "-12.00 [-19.00, -6.00]", "low > -10.00")
    assert any("21 looks" in note for note in card.notes)


@pytest.mark.parametrize("is_sealed_again", [False, True])
def test_a_verdict_that_was_changed_is_not_shown_as_one(tmp_path: Path, is_sealed_again: bool) -> None:
    runs = make_runs(tmp_path)
    file = runs[0] / "gate" / "verdict.json"
    body = json.loads(file.read_text())
    body["verdict"] = "pass"
    for result in body["results"]:
        if result["verdict"] == "undecided":
            result |= {"verdict": "pass", "low": -0.05}
    if is_sealed_again:
        del body["seal"]
        body["seal"] = hash_json(body)
    file.write_text(json.dumps(body))
    board = board_of(*runs)
    expected = "by the evidence" if is_sealed_again else "changed after it was sealed"
    assert expected in board.verdicts[0].problem
    page = write_board(board, tmp_path / "board.html").read_text()
    assert "not trusted" in page
    assert any(line.startswith("verdict not trusted") for line in board_lines(board))


def test_promotions_and_overrides_stay_visible(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    registry = runs[0].parent / "registry.jsonl"
    promote(registry, alias="prod", model=gated("dpo"), verdicts=[], by="ada", override="the shop needs it today")
    promote(registry, alias="prod", model=gated("ppo"), verdicts=[], by="bob", override="better after all")
    board = board_of(*runs)
    assert [(row.model, row.is_current) for row in board.promotions] == [("dpo", False), ("ppo", True)]
    assert [model.aliases for model in board.models] == [(), (), ("prod",)]
    page = write_board(board, tmp_path / "board.html").read_text()
    assert "<b>OVERRIDE</b> by ada: the shop needs it today" in page
    registry.write_text(registry.read_text().replace("ada", "eve"))
    assert any("registry.jsonl" in problem for problem in board_of(*runs).problems)


def test_badcases_have_their_status_and_replays(tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    add_case(
        runs[0].parent / "badcases", runs[0] / "exam" / "answers.jsonl", "dpo-mmlu-160", why="not so",
        check='lacks: "wrong"', severity="block", samples=1, needed=None, siblings=(),
    )  # fmt: skip
    (case,) = board_of(*runs).cases
    assert (case.id, case.status, case.why) == (read_badcases(runs[0].parent / "badcases")[0].id, "open", "not so")


BROKEN = {
    "not JSON": lambda text: text[:40],
    "no exams": lambda text: json.dumps({"models": ["sft"]}),
    "a list": lambda text: "[]",
    "a lost item": lambda text: text.replace('"items": 100', '"items": 101'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_exam_is_said_and_the_rest_is_shown(tmp_path: Path, how: str) -> None:
    runs = make_runs(tmp_path)
    file = runs[1] / "exam" / "exam.json"
    file.write_text(BROKEN[how](file.read_text()))
    board = board_of(*runs)
    assert any("two/exam" in problem and "again" in problem for problem in board.problems), board.problems
    assert "60.0" in write_board(board, tmp_path / "board.html").read_text()
    assert any(line.startswith("not read: ") for line in board_lines(board))


@pytest.mark.parametrize("how", ["twice", "null"])
def test_items_that_are_no_numbers_or_occur_twice_are_said(tmp_path: Path, how: str) -> None:
    runs = make_runs(tmp_path)
    file = runs[1] / "exam" / "items.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    first = lines[0] if how == "twice" else lines[1].replace('"score":1.0', '"score":null')
    file.write_text("".join([first, lines[0], *lines[2:]]))
    (problem,) = board_of(*runs).problems
    assert ("stands there twice" if how == "twice" else "has the score None") in problem


def test_a_folder_with_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    stage(tmp_path / "run", "sft", "sft", makes="sft")
    with pytest.raises(ConfigError, match="nothing to show"):
        board_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        board_of(tmp_path / "ruun")


def test_another_baseline_may_be_named(runs: list[Path]) -> None:
    board = board_of(*runs, baseline="dpo")
    sft = cell(board, "sft", "mmlu", "letter").difference
    assert sft is not None
    assert sft.value == pytest.approx(0.12)
    with pytest.raises(ConfigError, match="did you mean 'dpo'"):
        board_of(*runs, baseline="dpoo")


def test_a_verdict_alone_has_a_board(tmp_path: Path) -> None:
    runs = make_runs(tmp_path / "made")
    file = seal(tmp_path / "verdict.json", "dpo", "sft", [runs[0] / "exam", runs[0] / "eval"])
    board = board_of(file)
    assert [card.candidate for card in board.verdicts] == ["dpo"]
    assert "Nobody was asked anything" in write_board(board, tmp_path / "board.html").read_text()


@pytest.mark.parametrize("case", board_attacks.CASES)
def test_text_of_others_stays_text(case: str) -> None:
    assert board_attacks.attempt(case) is None
