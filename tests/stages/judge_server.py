"""A judge behind OpenAI's API, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Judges by `verdict(model, A, B)`; counts what it is asked."""

    daemon_threads = True
    asked = 0
    verdict: Callable[[str, str, str], str]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two of them wait for each other
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        text = body["messages"][0]["content"]
        first, second = (
            text.split(f"]] answer {place}\n")[1].rsplit(
                f"\n[[{text.split('[[')[1].split(']]')[0]}]] end of answer {place}"
            )[0]
            for place in "AB"
        )
        said = self.server.verdict(body["model"], first, second)
        reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        self.send_response(200 if said else 400)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def longer(model: str, first: str, second: str) -> str:
    """The judge `place` always takes the first, `dumb` says nothing readable; the others take the longer answer."""
    if model == "dumb":
        return "well, well"
    return '{"better": "%s"}' % ("A" if model == "place" or len(first) > len(second) else "B")
