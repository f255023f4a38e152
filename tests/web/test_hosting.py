"""What is hosted beside the labels: runs that are watched, and the board with what goes from it to people."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select
from team_site import TOKEN, Clock, make_local, make_site, new_shop

sys.path.insert(0, str(Path(__file__).parents[1] / "board"))
from board_files import make_runs

from kedge.commands.board.command import BoardRequest, make_board
from kedge.commands.label_pages import Hosted, TeamSettings, check_team, keep_badcase, make_pages
from kedge.commands.watch import open_feeds
from kedge.core.errors import ConfigError, KedgeError
from kedge.gate.badcases import read_badcases
from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.database import Store
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill
from kedge.web.app import Extras


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "r", manifest=new_manifest(name="r", kind="ppo", seed=1, settings=PPO_SETTINGS)) as run:
        fill(run, 20, every=10)
        run.finish("done")
    return tmp_path / "r"


def test_runs_are_watched_by_those_who_lead(store: Store, clock: Clock, run: Path) -> None:
    site = make_site(store, clock, extras=Extras(feeds=open_feeds([run])))
    project = new_shop(store)
    boss, ann = site.person("manager", projects=[project]), site.person("annotator", projects=[project])
    assert 'href="/watch/"' in boss.get("/manage").text
    page = boss.get("/watch/")
    assert "Kedge watch" in page.text
    nonce = re.findall(r'<script nonce="([^"]+)">', page.text)
    assert f"script-src 'nonce-{nonce[0]}'" in page.headers["content-security-policy"]
    assert "max-age" in page.headers["strict-transport-security"]
    assert boss.get("/watch/live").json()["html"].count("<svg") == 6
    for path in ("/watch/", "/watch/live", "/watch/samples"):
        assert ann.get(path).status_code == 404
        assert site.anybody().get(path).status_code == 303
    assert boss.post("/watch/live").status_code == 404


def test_what_was_lost_goes_from_the_board_to_people(store: Store, clock: Clock, tmp_path: Path) -> None:
    request = BoardRequest(paths=make_runs(tmp_path, {}), badcases=tmp_path / "none", registry=tmp_path / "none.jsonl")
    site = make_site(store, clock, extras=Extras(board=lambda: make_board(request)))
    project = new_shop(store)
    boss, auditor = site.person("manager", projects=[project]), site.person("auditor", projects=[project])
    page = boss.get("/board")
    nonce = re.findall(r'<script nonce="([^"]+)">', page.text)[0]
    assert f"'nonce-{nonce}'" in page.headers["content-security-policy"]
    found = re.search(r'data-model="([^"]+)" data-column="([^"]+)" data-item="([^"]+)" data-project="shop"', page.text)
    assert found is not None
    body = {"project": "shop", "model": found[1], "column": found[2], "item": found[3]}
    assert auditor.get("/board").status_code == 200
    assert auditor.post("/board/send", body).status_code == 404
    assert boss.post("/board/send", body).json() == {"say": "sent to shop"}
    assert boss.post("/board/send", body).json() == {"say": "shop has it already"}
    assert boss.post("/board/send", body | {"item": "nothing"}).status_code == 404
    models = store.read(lambda connection: connection.scalars(select(tables.answer.c.model)).all())
    assert found[1] in models
    assert len(models) == 2


def test_a_badcase_is_made_on_the_board_by_who_may(store: Store, clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "badcases"
    request = BoardRequest(paths=make_runs(tmp_path, {}), badcases=folder, registry=tmp_path / "none.jsonl")
    extras = Extras(board=lambda: make_board(request), add_badcase=partial(keep_badcase, folder))
    site = make_site(store, clock, extras=extras)
    project = new_shop(store)
    boss, auditor = site.person("manager", projects=[project]), site.person("auditor", projects=[project])
    lost = next(item for item in make_board(request).lost.items if item.source is not None)
    body = {"project": "shop", "model": lost.model, "column": lost.column, "item": lost.item}
    case = body | {"why": "says it is sure", "check": "lacks", "value": lost.answer, "severity": "warn"}
    assert "data-badcase" in boss.get("/board").text.partition("<script")[0]
    for_auditors = auditor.get("/board").text.partition("<script")[0]
    assert "kedge badcase add" in for_auditors
    assert "data-badcase" not in for_auditors
    assert "data-send" not in for_auditors
    assert auditor.post("/board/badcase", case).status_code == 404
    assert boss.post("/board/badcase", case, x_csrf_token="0" * 64).status_code == 403
    assert boss.post("/board/badcase", case | {"item": "nothing"}).status_code == 404
    assert boss.post("/board/badcase", case | {"check": "judge"}).status_code == 422
    for check, value, problem in (
        ("contains", lost.answer, "the bad answer passes this check"),
        ("number", "four", "this is no number"),
        ("regex", "(", "not a regular expression"),
    ):
        refused = boss.post("/board/badcase", case | {"check": check, "value": value})
        assert refused.status_code == 400
        assert problem in refused.json()["error"]
    assert not folder.exists()
    told = boss.post("/board/badcase", case).json()["say"]
    (kept,) = read_badcases(folder)
    assert told == f"{kept.id}: added; every gate replays it"
    assert (kept.why, kept.severity, kept.check.lacks) == ("says it is sure", "warn", [lost.answer])
    assert boss.person is not None
    assert kept.origin["person"] == pseudonym(project, boss.person.uid)
    assert kept.id in boss.get("/board").text
    assert "is a case already" in boss.post("/board/badcase", case).json()["error"]
    assert "board.badcase" in boss.get("/manage").text


def test_a_board_that_is_a_file_sends_nothing(tmp_path: Path) -> None:
    from kedge.report.board.page import render_board

    html = render_board(make_board(BoardRequest(paths=make_runs(tmp_path, {}), badcases=tmp_path / "none")))
    assert "connect-src" not in html
    assert "data-send" not in html.partition("<script")[0]


def test_on_this_machine_runs_need_the_token(store: Store, run: Path) -> None:
    me = make_local(store, Extras(feeds=open_feeds([run])))
    assert me.client.get("/watch/", params={"token": TOKEN}).status_code == 200
    assert me.client.get("/watch/live", params={"token": TOKEN}).status_code == 200
    assert me.client.get("/watch/").status_code == 403


def test_what_cannot_be_hosted_is_refused_before_it_starts(store: Store, clock: Clock, tmp_path: Path) -> None:
    entrance = make_site(store, clock).entrance
    with pytest.raises(ConfigError, match="the same name"):
        make_pages(entrance, Hosted(chat=["a=http://127.0.0.1/v1", "a=http://127.0.0.1:2/v1"]))
    for hosted in (Hosted(watch=[tmp_path / "none"]), Hosted(board=[tmp_path / "none"])):
        with pytest.raises(KedgeError):
            make_pages(entrance, hosted)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "https://labels.example.org"}, "need TLS"),
        ({"url": "http://labels.example.org", "behind_proxy": ["10.0.0.1"]}, "--url http://labels"),
        ({"url": "https://labels.example.org/path", "behind_proxy": ["10.0.0.1"]}, "nothing after it"),
        ({"url": "", "behind_proxy": ["10.0.0.1"]}, "the public address is needed"),
        ({"url": "https://x", "tls_cert": Path("a.pem")}, "belong together"),
        ({"url": "https://x", "tls_cert": Path("a.pem"), "tls_key": Path("b.pem")}, "there is no such file"),
    ],
)
def test_a_team_is_served_over_tls_or_not_at_all(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_team(TeamSettings(**settings))


def test_a_team_behind_a_proxy_or_with_its_own_certificate_may_start(tmp_path: Path) -> None:
    check_team(TeamSettings(url="https://labels.example.org", behind_proxy=["10.0.0.1"]))
    for name in ("a.pem", "b.pem"):
        (tmp_path / name).write_text("x")
    files = {"tls_cert": tmp_path / "a.pem", "tls_key": tmp_path / "b.pem"}
    check_team(TeamSettings(url="https://labels.example.org:8443", **files))
    with pytest.raises(ConfigError, match="either here or at the proxy"):
        check_team(TeamSettings(url="https://x", behind_proxy=["10.0.0.1"], **files))
