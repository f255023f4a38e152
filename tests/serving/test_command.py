"""`kedge serve`: its token, what it prints, what it refuses before anything is loaded, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from kedge.commands.serve import Service, Serving, introduction, open_service, serve, token_from
from kedge.core.errors import ConfigError, ModelError

TEXT = Service(compute=lambda kind, batch: batch, rows=1, make_app=lambda door: None, scores=False)  # type: ignore[arg-type,return-value]


def test_a_token_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = token_from(file)
    assert len(token) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token_from(file) == token
    assert token_from(None) != token_from(None)


@pytest.mark.parametrize("text", ["", "short", "has a space in its middle", "ümlaut-ümlaut-ümlaut"])
def test_a_file_that_holds_no_token_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match="expected one token of 16 ASCII characters"):
        token_from(tmp_path / "token")


def test_the_token_is_printed_once_in_a_line_that_can_be_pasted(tmp_path: Path) -> None:
    lines = list(introduction(TEXT, "127.0.0.1:80", "it's", token="secret-secret-1", token_file=None))
    assert sum("secret-secret-1" in line for line in lines) == 1
    words = shlex.split(lines[1])
    assert words[:4] == [
        "curl",
        "http://127.0.0.1:80/v1/chat/completions",
        "-H",
        "Authorization: Bearer secret-secret-1",
    ]
    assert json.loads(words[-1])["model"] == "it's"
    hidden = list(introduction(TEXT, "0.0.0.0:80", "m", token="secret-secret-1", token_file=tmp_path / "t"))
    assert not any("secret-secret-1" in line for line in hidden)
    assert any("unencrypted" in line for line in hidden)
    assert not any("unencrypted" in line for line in lines)


def test_what_cannot_be_served_is_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--objective x: .* is a language model"):
        open_service(Serving(model=str(model_folder), objective="x"), say=print)
    with pytest.raises(ModelError, match="no language model here"):
        open_service(Serving(model=str(tmp_path)), say=print)
    with pytest.raises(ConfigError, match="--host no-such-host"):
        serve(Serving(model=str(model_folder)), host="no-such-host.invalid", port=0, token_file=None, say=print)
    with pytest.raises(ConfigError, match=r"--host|--port"):
        serve(Serving(model=str(model_folder)), host="203.0.113.7", port=0, token_file=None, say=print)


@pytest.mark.slow
def test_sigterm_finishes_what_is_being_answered(model_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kedge.cli", "serve", str(model_folder), "--name", "tiny", "--device", "cpu"]
    command += ["--token-file", str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.match(r"(http://127.0.0.1:\d+)/v1 serves tiny", process.stdout.readline())
        assert found
        headers = {"Authorization": f"Bearer {(tmp_path / 't').read_text().strip()}"}
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 900, "seed": 1, "stop": ["never there"]}
        replies: list[httpx2.Response] = []

        def ask() -> None:
            replies.append(
                httpx2.post(f"{found[1]}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)
            )

        thread = threading.Thread(target=ask)
        thread.start()
        while httpx2.get(f"{found[1]}/health", headers=headers, trust_env=False).status_code != 200:
            pass
        threading.Event().wait(0.5)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert replies[0].json()["usage"]["completion_tokens"] > 0
        assert process.wait(30) == 0
