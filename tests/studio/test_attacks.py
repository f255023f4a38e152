"""Nothing leads out of the project folder, and no other site speaks in its name."""

from __future__ import annotations

import pytest
from studio_attacks import CASES, Case, attempt
from studio_site import TOKEN, StudioSite

REPEATED = ("model", "stages.sft.from", "chat_template", "extends")
"""Settings that are tried with the same paths as the data of a stage."""
PARAMETERS = [
    pytest.param(case, id=case.name, marks=pytest.mark.slow if case.where == "setting" and case.at in REPEATED else ())
    for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_what_leads_out_is_refused(case: Case) -> None:
    assert attempt(case) is None


def test_pages_run_no_script_but_their_own(site: StudioSite) -> None:
    answer = site.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "https://" not in answer.text


def test_names_of_files_are_text(site: StudioSite) -> None:
    (site.folder / "data" / "<img src=x onerror=alert(1)>.jsonl").write_text("{}")
    assert "<img" not in site.get("/data").text


def test_nothing_is_answered_without_the_token(site: StudioSite) -> None:
    host = {"host": "127.0.0.1:8123"}
    assert site.client.get("/nothing", headers=host).status_code == 403
    assert site.client.get("/", params={"token": TOKEN[:-1]}, headers=host).status_code == 403
    assert site.client.get("/", params={"token": TOKEN}, headers=host).status_code == 200
