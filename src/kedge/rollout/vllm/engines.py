"""The servers of a run: started or given, kept alive, all with the same weights.

A server that dies is started again, gets the last weights, and the rows that it took along are asked again with the
same seeds. One that was given cannot be started: the others answer for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from kedge.core.errors import GeneratorError, SyncError
from kedge.core.urls import redacted
from kedge.rollout.generators import Report
from kedge.rollout.vllm.http import Answer, Api, Question, ServerFailed, ServerLost, ask_all
from kedge.rollout.vllm.settings import VllmSettings, refused_version
from kedge.rollout.vllm.weights import refuse_other_weights


class Server(Protocol):
    """Where a server is, and what can be done when it is gone."""

    @property
    def url(self) -> str: ...
    @property
    def can_start(self) -> bool: ...
    def start(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class GivenServer:
    """A server that somebody else started."""

    can_start = False

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Engines:
    def __init__(self, servers: Sequence[Server], settings: VllmSettings, report: Report) -> None:
        self._settings, self._report = settings, report
        self._servers = list(servers)
        self._restarts = 0
        self._weights: tuple[Path, int, Sequence[float]] | None = None
        self._probe: Sequence[int] = ()
        self._asking: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self.is_closed = False
        try:
            for server in self._servers:
                server.wait()
            self._check_versions()
        except BaseException:
            self.close()
            raise

    def _check_versions(self) -> None:
        versions: dict[str, str] = {}
        for server in self._servers:
            try:
                versions[server.url] = self._api(server).version()
            except ServerLost as lost:
                raise GeneratorError(f"no vLLM server answers at {redacted(server.url)}: {lost}") from lost
            if reason := refused_version(versions[server.url], server.url):
                raise GeneratorError(reason)
        names = ", ".join(f"{redacted(url)} ({version})" for url, version in versions.items())
        self._report("info", "vllm.servers", f"vLLM answers at {names}", versions=sorted(set(versions.values())))

    # Weights

    def load_weights(self, folder: Path, version: int, *, probe: Sequence[int], scores: Sequence[float]) -> None:
        """Every server has the weights in `folder`, or an error says which one has not. `scores` are the trainer's of
        the text `probe` with these weights."""
        self._weights, self._probe = (folder, version, scores), probe
        for server in list(self._servers):
            try:
                self._send(server)
            except ServerLost as lost:
                self._replace(server, lost)
        self._refuse_none_left("none of them could be given weights")

    def _send(self, server: Server) -> None:
        if self._weights is None:
            return
        folder, version, scores = self._weights
        api = self._api(server)
        try:
            api.load_weights(str(folder.resolve()), version)
        except SyncError:
            raise
        except GeneratorError as error:
            raise SyncError(f"weights of version {version} could not be handed over: {error}") from error
        refuse_other_weights(scores, api.score(self._probe), limit=self._settings.mismatch, url=redacted(server.url))

    # Answers

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """An answer to each request, in their order; those of servers that died are asked again."""
        answers: dict[int, Answer] = {}
        while left := [row for row in range(len(bodies)) if row not in answers]:
            urls = [server.url for server in self._servers]
            questions = [Question(url=urls[at % len(urls)], body=bodies[row]) for at, row in enumerate(left)]
            replies = self._ask_all(questions)
            losses: dict[str, ServerLost] = {}
            for row, question, reply in zip(left, questions, replies, strict=True):
                if isinstance(reply, ServerLost):
                    losses[question.url] = reply
                else:
                    answers[row] = reply
            for server in [server for server in self._servers if server.url in losses]:
                self._replace(server, losses[server.url])
            self._refuse_none_left("; ".join(map(str, losses.values())))
        self._restarts = 0
        return [answers[row] for row in range(len(bodies))]

    def _ask_all(self, questions: Sequence[Question]) -> list[Answer | ServerLost]:
        async def ask() -> list[Answer | ServerLost]:
            task = asyncio.current_task()
            assert task is not None
            self._asking = asyncio.get_running_loop(), task
            return await ask_all(questions, timeout_s=self._settings.timeout_s)

        try:
            return asyncio.run(ask())
        except asyncio.CancelledError as cancelled:
            raise GeneratorError("the run has ended") from cancelled
        finally:
            self._asking = None

    # Servers that die

    def _replace(self, server: Server, lost: ServerLost) -> None:
        """Start a dead server again; one that cannot be started, or fails again and again, is left out."""
        if self.is_closed:
            raise GeneratorError("the run has ended")
        what = f"vLLM at {redacted(server.url)} is lost ({lost})"
        self._restarts += 1
        lives = (isinstance(lost, ServerFailed) or not server.can_start) and self._api(server).is_healthy()
        if self._restarts > self._settings.restarts or not (lives or server.can_start):
            self._servers.remove(server)
            server.close()
            self._report("warning", "vllm.lost", f"{what}; {len(self._servers)} server(s) are left")
            return
        if not lives:
            self._report("warning", "vllm.restarted", f"{what}; it is started again, and its rows are asked again")
            server.start()
        try:
            server.wait()
            self._send(server)  # also to one that answers again: it may have been started anew
        except ServerLost as again:
            self._replace(server, again)

    def _refuse_none_left(self, what: str) -> None:
        if not self._servers:
            raise GeneratorError(
                f"no vLLM server is left to answer ({what}). Everything is saved: mend them, and go on with --resume"
            )

    def close(self) -> None:
        """End what is under way, and the servers that Kedge started."""
        self.is_closed = True
        if asking := self._asking:
            loop, task = asking
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)
        for server in self._servers:
            server.close()

    def _api(self, server: Server) -> Api:
        return Api(server.url, timeout_s=self._settings.timeout_s)
