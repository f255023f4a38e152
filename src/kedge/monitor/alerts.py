"""Alerts: events at or above a level go to webhooks and commands, from a background thread.

Nothing here can stop or slow a run: failed deliveries are counted and reported in the run's own events, the first one
at once and their number at the end.
Left out: retries, and any format but one JSON object an event; a command can translate it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from queue import Full, Queue
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import httpx2
from pydantic import AfterValidator, Field, PlainSerializer, model_validator

from kedge.core.errors import ConfigError
from kedge.core.protocols import Metrics, Tracker
from kedge.core.settings import Section
from kedge.core.urls import HIDDEN, check_url, failure_reason, is_loopback, redacted, refuse_open_key
from kedge.monitor.trackers.forwarding import ForwardingTracker

MAX_WAITING = 256
"""Events that may wait for a slow receiver; more are counted as not delivered."""
_RANKS = {"ok": 0, "info": 1, "warning": 2, "fatal": 3}

Send = Callable[[bytes], None]


class Webhook(Section):
    """A URL that gets the event as JSON by POST; a status below 300 means delivered."""

    url: Annotated[str, AfterValidator(check_url), PlainSerializer(redacted)] | None = None
    """The URL. It is written into the run's folder, without passwords and values of its query: for one whose path is a
    secret, use `url_variable`."""
    url_variable: str | None = None
    """Environment variable that holds the URL, which counts as a secret: over https, or to this machine."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds for one delivery, from the look-up of the host to the status of the reply."""

    @model_validator(mode="after")
    def _has_one_url(self) -> Webhook:
        if (self.url is None) == (self.url_variable is None):
            raise ValueError("give one of url and url_variable")
        if self.url is not None:
            refuse_open_key(self.url, key=None)
        return self

    def address(self) -> str:
        """The URL to call; a ConfigError where the environment variable holds none that may be called."""
        if self.url is not None:
            return self.url
        url = os.environ.get(self.url_variable or "", "").strip()
        where = f"alerts.webhooks: the environment variable {self.url_variable}"
        try:
            check_url(url)
        except ValueError:  # its words hold the URL, whose path is the secret
            raise ConfigError(f"{where} holds no http(s) URL") from None
        if urlsplit(url).scheme == "http" and not is_loopback(url):
            raise ConfigError(
                f"{where} holds a URL of http://{urlsplit(url).hostname}: it counts as a secret and would travel "
                "unencrypted; use https://, or give a URL that is none as url"
            )
        return url


class Command(Section):
    """A program that gets the event as JSON on its standard input; exit code 0 means delivered."""

    run: list[str] = Field(min_length=1)
    """The program and its arguments; no shell is involved."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds after which it is killed, with everything it started."""


class AlertSettings(Section):
    """Who is notified of events while a run goes on."""

    level: Literal["info", "warning", "fatal"] = "warning"
    """The lowest level that is sent."""
    webhooks: list[Webhook] = Field(default_factory=list)
    """URLs to POST to."""
    commands: list[Command] = Field(default_factory=list)
    """Programs to start."""
    flush_s: float = Field(default=15.0, ge=0)
    """Seconds that the end of a run waits for deliveries under way."""


class Alerts(ForwardingTracker):
    """A tracker around another one, which gets every call first. `run` names the run in what is sent."""

    def __init__(self, inner: Tracker, settings: AlertSettings, *, run: str) -> None:
        super().__init__(inner)
        self._run = run
        self._min_rank = _RANKS[settings.level]
        self._flush_s = settings.flush_s
        self._receivers = {**_webhooks(settings.webhooks), **_commands(settings.commands)}
        self._queue: Queue[bytes | None] = Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pending = 0
        self._failures: list[str] = []
        self._is_reported = False

    def log(self, metrics: Metrics, *, step: int) -> None:
        super().log(metrics, step=step)
        self._report_failure()

    def event(self, event: Mapping[str, Any]) -> None:
        super().event(event)
        if self._receivers and _RANKS.get(str(event.get("level")), 0) >= self._min_rank:
            self._enqueue(_encoded(event, self._run))
        self._report_failure()

    def close(self) -> None:
        """Wait for deliveries under way, report what was not delivered, close the tracker."""
        if self._thread is not None:
            self._flush(self._thread)
            self._thread = None
        super().close()

    def _flush(self, thread: threading.Thread) -> None:
        deadline = time.monotonic() + self._flush_s
        while self._pending and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._pending:
            self._queue.put(None)
            thread.join()
        with self._lock:
            self._failures += ["not delivered before the run ended"] * self._pending
        self._report_failure()
        if len(self._failures) > 1:
            message = f"{len(self._failures)} alerts in all could not be delivered"
            super().event(_warning("alerts.undelivered", message, {"count": len(self._failures)}))

    def _enqueue(self, body: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="kedge-alerts", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(body)
        except Full:
            self._fail(f"{MAX_WAITING} events are waiting already", len(self._receivers))
        else:
            with self._lock:
                self._pending += len(self._receivers)

    def _deliver(self) -> None:
        while (body := self._queue.get()) is not None:
            for name, send in self._receivers.items():
                try:
                    send(body)
                except Exception as error:  # whatever a receiver does, the run goes on
                    self._fail(f"{name}: {type(error).__name__}: {error}", 1)
                with self._lock:
                    self._pending -= 1

    def _fail(self, why: str, count: int) -> None:
        with self._lock:
            self._failures += [why] * count

    def _report_failure(self) -> None:
        """Report the first failure, from the run's own thread: its journals have one writer."""
        if self._failures and not self._is_reported:
            self._is_reported = True
            why = self._failures[0]
            message = f"An alert could not be delivered ({why}). Later failures are counted and told at the end."
            super().event(_warning("alerts.failed", message, {"error": why}))


def _webhooks(webhooks: list[Webhook]) -> dict[str, Send]:
    senders: dict[str, Send] = {}
    for number, hook in enumerate(webhooks, start=1):
        url = hook.address()
        # Paths of webhooks are often secrets: the name has the host alone.
        senders[f"webhook {number} ({urlsplit(url).hostname})"] = _poster(url, hook.timeout_s)
    return senders


def _poster(url: str, timeout_s: float) -> Send:
    def send(body: bytes) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(_post(url, body, timeout_s))
        except TimeoutError:
            raise TimeoutError(f"no reply within {timeout_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConnectionError(redacted(failure_reason(error).replace(url, HIDDEN))) from None
        finally:
            loop.close()

    return send


async def _post(url: str, body: bytes, timeout_s: float) -> None:
    """Deliver to the URL of the recipe and to no other: a redirect is a failure. What the reply says is not read."""
    async with (
        asyncio.timeout(timeout_s),  # of the whole exchange: httpx's limits start again with every byte
        httpx2.AsyncClient(timeout=None, follow_redirects=False, trust_env=not is_loopback(url)) as http,
        http.stream("POST", url, content=body, headers={"Content-Type": "application/json"}) as reply,
    ):
        if not reply.is_success:
            raise ConnectionError(f"HTTP {reply.status_code} {reply.reason_phrase}".strip())


def _commands(commands: list[Command]) -> dict[str, Send]:
    return {
        f"command {number} ({command.run[0]})": _starter(command.run, command.timeout_s)
        for number, command in enumerate(commands, 1)
    }


def _starter(command: list[str], timeout_s: float) -> Send:
    def send(body: bytes) -> None:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child:
            try:
                child.communicate(body, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise TimeoutError(f"killed after {timeout_s:g} s") from None
        if child.returncode:
            raise ChildProcessError(f"exit code {child.returncode}")

    return send


def _encoded(event: Mapping[str, Any], run: str) -> bytes:
    """The event as JSON with the run's name, and with `text`, one line, which is what chat rooms show."""
    at = "" if event.get("step") is None else f" at step {event['step']}"
    text = f"{run}{at}: {event.get('level')}: {event.get('message')}"
    return json.dumps(_plain({**event, "run": run, "text": text}), ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """`value` in JSON types; what JSON lacks becomes text, so that no alert is lost over it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast("list[Any]", value)]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _warning(code: str, message: str, evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {"level": "warning", "code": code, "message": message, "step": None, "evidence": evidence}
