"""The local page: who may see it, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from kedge.report.live.feed import RunFeed
from kedge.report.live.web import make_app
from kedge.runs.folder import Run
from kedge.testing.streams import fill

MakeRun = Callable[..., Run]
TOKEN = "s3cret-token"
HOST = "127.0.0.1:8123"


@pytest.fixture
def run(begin: MakeRun) -> Run:
    run = begin("a")
    fill(run, 20, every=10)
    return run


@pytest.fixture
def client(run: Run) -> TestClient:
    app = make_app([RunFeed(run.folder)], token=TOKEN, hosts=(HOST, "localhost:8123"))
    return TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=True)


@pytest.mark.parametrize("path", ["/", "/live", "/overlay", "/samples", "/docs", "/openapi.json", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "s3cret-toke", "s3cret-token2", "S3CRET-TOKEN", "ünicode"])
def test_nothing_without_the_token(client: TestClient, path: str, token: str | None) -> None:
    answer = client.get(path, params={} if token is None else {"token": token})
    assert answer.status_code == 403
    assert answer.text == "Open the address that kedge watch printed."


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:80", "evil.example:8123", ""])
def test_nothing_by_another_name(client: TestClient, host: str) -> None:
    assert client.get("/", params={"token": TOKEN}, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", [HOST, "localhost:8123"])
def test_the_page_stands_alone_and_is_guarded(client: TestClient, host: str) -> None:
    answer = client.get("/", params={"token": TOKEN}, headers={"host": host})
    assert answer.status_code == 200
    nonce = re.findall(r'<script nonce="([^"]+)">', answer.text)
    assert f"script-src 'nonce-{nonce[0]}'" in answer.headers["content-security-policy"]
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert TOKEN not in answer.text
    assert "http" not in answer.text
    assert client.get("/nothing", params={"token": TOKEN}).status_code == 404
    assert client.get("/docs", params={"token": TOKEN}).status_code == 404


def test_news_come_once_and_again_when_there_are_new_ones(client: TestClient, run: Run) -> None:
    first = client.get("/live", params={"token": TOKEN}).json()
    assert first["is_running"] is True
    assert first["html"].count("<svg") == 6
    assert "step 20 of 100" in first["html"]
    again = client.get("/live", params={"token": TOKEN, "since": first["revision"]})
    assert again.status_code == 204
    run.log({"reward/mean": 1234.0, "kl/mean": 1.0}, 21)
    run.event("warning", "x", "<i>careful</i>", 21)
    run.finish("done")
    news = client.get("/live", params={"token": TOKEN, "since": first["revision"]}).json()
    assert news["revision"] > first["revision"]
    assert news["is_running"] is False
    assert "<b>1,234</b>reward" in news["html"]
    assert "&lt;i&gt;careful&lt;/i&gt;" in news["html"]


def test_several_runs_and_the_stage_that_is_asked_for(begin: MakeRun, run: Run) -> None:
    whole = begin("loop", "pipeline")
    begin("loop/sft", "sft").log({"train/loss": 2.0}, 1)
    begin("loop/ppo").log({"reward/mean": 7.0}, 1)
    feeds = [RunFeed(whole.folder), RunFeed(run.folder)]
    client = TestClient(make_app(feeds, token=TOKEN, hosts=(HOST,)), base_url=f"http://{HOST}")
    html = client.get("/live", params={"token": TOKEN}).json()["html"]
    assert html.count('<section class="run"') == 2
    assert "<b>7</b>reward" in html
    html = client.get("/live", params={"token": TOKEN, "stage": ["sft", ""]}).json()["html"]
    assert "<b>2</b>loss" in html
    assert "<b>7</b>reward" not in html
    assert re.findall(r'data-run="0" data-stage="(\w+)" aria-pressed="true"', html) == ["sft"]


def test_samples_are_searched_escaped_and_paged(client: TestClient, run: Run) -> None:
    for step in range(30, 60):
        run.sample({"prompt": f"zebra {step}", "answer": "<b>stripes</b>"}, step)
    client.get("/live", params={"token": TOKEN})
    first = client.get("/samples", params={"token": TOKEN, "q": "ZEBRA"}).text
    assert "30 found, 1 to 20 shown" in first
    assert "&lt;b&gt;stripes&lt;/b&gt;" in first
    assert "<b>stripes" not in first
    assert 'data-first="20"' in first
    second = client.get("/samples", params={"token": TOKEN, "q": "zebra", "first": 20}).text
    assert "21 to 30 shown" in second
    assert 'data-first="0"' in second
    assert client.get("/samples", params={"token": TOKEN, "run": 5}).status_code == 404


def test_picked_metrics_are_drawn_in_one_chart(run: Run, begin: MakeRun) -> None:
    other = begin("b")
    fill(other, 30, every=10, seed=1)
    app = make_app([RunFeed(run.folder), RunFeed(other.folder)], token=TOKEN, hosts=(HOST,))
    client = TestClient(app, base_url=f"http://{HOST}")
    news = client.get("/live", params={"token": TOKEN}).json()
    assert {"reward/mean", "kl/mean"} <= set(news["metrics"])
    assert not {"step", "at"} & set(news["metrics"])

    def overlay(**values: object) -> str:
        return client.get("/overlay", params={"token": TOKEN, **values}).text  # type: ignore[dict-item]

    both = overlay(metric=["reward/mean", "kl/mean"])
    assert both.count('class="curve') == 4  # two metrics of two runs
    assert overlay(metric=["kl/mean"], smoothing=10) != overlay(metric=["kl/mean"])
    scaled = overlay(metric=["reward/mean", "kl/mean"], is_scaled=True)
    assert " to " in scaled
    assert "Pick a metric" in overlay()
    assert "Pick a metric" in overlay(metric=["no/such"])
    assert "<script>" not in overlay(metric=["<script>"])
    assert client.get("/overlay", params={"token": TOKEN, "smoothing": 0}).status_code == 422


def test_smoothing_draws_the_values_faintly_behind(client: TestClient) -> None:
    plain = client.get("/live", params={"token": TOKEN}).json()["html"]
    smooth = client.get("/live", params={"token": TOKEN, "smoothing": 5}).json()["html"]
    assert "faint" not in plain
    assert smooth.count(" faint") * 2 == smooth.count('class="curve')
    assert smooth.count('<p class="key') == plain.count('<p class="key')  # faint lines have no name
