"""Which layer is taken on which machine, what is refused, and what is said about it."""

from __future__ import annotations

import os

import pytest

from kedge.core.errors import ConfigError
from kedge.rewards import isolation
from kedge.rewards.isolation import Layer, Trial, choose, describe
from kedge.rewards.sandbox import Job, Limits, run


def pretend(monkeypatch: pytest.MonkeyPatch, uid: int, **trials: Trial) -> None:
    """A machine on which layers work as `trials` say, and the others do not."""

    def tried(layer: Layer, network: str = "none") -> Trial:
        return trials.get(layer, Trial(locks={}, reason="refused by the test"))

    monkeypatch.setattr(isolation, "tried", tried)
    monkeypatch.setattr(os, "geteuid", lambda: uid)


WORKS = Trial(locks={"calls": True, "files": True, "counts": True, "nobody": True})
WITHOUT_LANDLOCK = Trial(locks={"calls": True, "files": False, "nobody": True})
WITHOUT_FILTER = Trial(locks={"calls": False, "files": False, "nobody": True})


def test_auto_takes_the_strongest_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, bubblewrap=WORKS, namespaces=WORKS, limits=WORKS)
    assert choose("auto") == "bubblewrap"
    assert choose("namespaces") == "namespaces"
    pretend(monkeypatch, 0, namespaces=WORKS, limits=WORKS)
    assert choose("auto") == "namespaces"
    pretend(monkeypatch, 1000, limits=WORKS)
    assert choose("auto") == "limits"


@pytest.mark.parametrize(("uid", "trial"), [(0, WORKS), (1000, WITHOUT_LANDLOCK)])
def test_limits_must_be_written_out_where_they_are_weak(
    monkeypatch: pytest.MonkeyPatch, uid: int, trial: Trial
) -> None:
    pretend(monkeypatch, uid, limits=trial)
    with pytest.raises(ConfigError) as refusal:
        run(Job(code=""), Limits())
    for words in (
        "not run here",
        "bubblewrap: refused by the test",
        "apt-get install bubblewrap",
        "`isolation: limits`",
    ):
        assert words in str(refusal.value)
    assert choose("limits") == "limits"
    assert choose("any") == "limits"  # for code of ours


def test_a_layer_that_was_asked_for_and_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1000, limits=WORKS)
    with pytest.raises(ConfigError, match="isolation: bubblewrap does not work here: refused by the test"):
        choose("bubblewrap")


def test_where_the_network_cannot_be_cut_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1000, limits=WITHOUT_FILTER)
    with pytest.raises(ConfigError, match="cannot cut a process off from the network"):
        choose("limits")
    assert choose("limits", "allowed") == "limits"


def test_without_bubblewrap_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_trials", {})
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert isolation.tried("bubblewrap").reason in ("bwrap is not installed", "it needs Linux")


def test_a_machine_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    monkeypatch.setattr(isolation, "_trials", {})
    monkeypatch.setattr(isolation, "_try", lambda layer, network: tries.append(layer) or WORKS)
    assert [choose("auto") for _ in range(3)] == ["bubblewrap"] * 3
    assert tries == ["bubblewrap"]


def test_what_is_used_is_said_with_what_it_does_not_prevent(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, namespaces=WORKS, limits=WITHOUT_LANDLOCK)
    assert describe("namespaces") == "isolation namespaces (allowed system calls, Landlock, runs as nobody)"
    words = describe("limits")
    assert words.startswith(
        "isolation limits (allowed system calls, runs as nobody), without: Landlock, files and threads counted as they "
        "are made; not prevented: "
    )
    assert all(weakness in words for weakness in isolation.WEAKNESSES)
