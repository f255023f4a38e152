"""The servers of a run: started or given, kept alive, all with the same weights.

A server that dies is started again, gets the last weights, and the rows that it took along are asked again with the
same seeds. One that was given cannot be started: the others answer for it. On GPUs that learn, servers are awake only
while a batch is sampled: they wake, get the weights, answer, and sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kedge.core.errors import GeneratorError
from kedge.core.urls import redacted
from kedge.rollout.generators import Report
from kedge.rollout.vllm.handover import Handover, deliver
from kedge.rollout.vllm.http import MODEL, Answer, Api, Question, ServerFailed, ServerHangs, ServerLost, ask_all
from kedge.rollout.vllm.settings import VllmSettings, refused_version


class Server(Protocol):
    """Where a server is, and what can be done when it is gone."""

    @property
    def url(self) -> str: ...
    @property
    def can_start(self) -> bool: ...
    def start(self) -> None: ...
    def wait(self) -> None: ...
    def tail(self) -> str:
        """The last lines of its log."""
        ...

    def close(self) -> None: ...


class GivenServer:
    """A server that somebody else started."""

    can_start = False

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None: ...
    def wait(self) -> None: ...
    def tail(self) -> str:
        return ""

    def close(self) -> None: ...


class Engines:
    def __init__(
        self, servers: Sequence[Server], settings: VllmSettings, report: Report, *, trials: Sequence[Handover] = ()
    ) -> None:
        """`trials` go to every server that is started, before its first weights, to prove that those arrive."""
        self._settings, self._report = settings, report
        self._servers = list(servers)
        self._restarts = 0
        self._trials = trials
        self._handover: Handover | None = None
        self._adapters: dict[str, str] = {}
        """The adapter that a server has, by its address; a server that is started again has another."""
        self._asleep = set[str]()
        """Addresses of servers that sleep."""
        self._asking: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self.is_closed = False
        try:
            for server in self._servers:
                server.wait()
            self._check_versions()
            self._sleep()
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

    def load_weights(self, handover: Handover) -> None:
        """Every server has these weights, or an error says which one has not. One that sleeps gets them when it wakes
        up."""
        self._handover = handover
        self._send_to([server for server in self._servers if server.url not in self._asleep])

    def _send_to(self, servers: Sequence[Server]) -> None:
        for server in servers:
            try:
                self._send(server)
            except ServerLost as lost:
                self._replace(server, lost)
        self._refuse_none_left("none of them could be given weights")

    def _send(self, server: Server) -> None:
        """This server is awake and has the weights of the run, which is proven. A new one proves first that it takes
        adapters."""
        if self._handover is None:
            return
        url, api = server.url, self._api(server)
        trials = () if url in self._adapters else self._trials
        for handover in (*trials, self._handover):
            deliver(api, handover, is_asleep=url in self._asleep)
            self._asleep.discard(url)
            if handover.adapter is not None:
                self._unload(api, self._adapters.get(url), but=handover.adapter)
                self._adapters[url] = handover.adapter

    def _unload(self, api: Api, old: str | None, *, but: str) -> None:
        """A server forgets the adapter before this one. That it cannot is no reason to end a run, but worth knowing."""
        if old is None or old == but:
            return
        try:
            api.unload_adapter(old)
        except GeneratorError as error:
            self._report("warning", "vllm.unload", f"the adapter {old!r} was not unloaded: {error}")

    # Sleep, on GPUs that learn

    def _wake(self) -> None:
        """Every server is awake, with the weights of the run."""
        if not self._settings.is_shared:
            return
        if self._handover is None:
            raise GeneratorError("vLLM sleeps, and no weights were handed over for it to wake up with")
        self._send_to([server for server in self._servers if server.url in self._asleep])

    def _sleep(self) -> None:
        """Every server has given up its memory, or the run ends: nothing could be learnt beside it. One that died has
        given it up too, and is started again for the next batch."""
        if not self._settings.is_shared:
            return
        for server in self._servers:
            try:
                # The base of an adapter stays what it is, and waits in the host's memory; other weights come anew.
                self._api(server).sleep(1 if self._settings.sends_adapters else 2)
            except (ServerHangs, GeneratorError) as error:
                raise GeneratorError(
                    f"vLLM does not sleep, and what learns needs its memory ({error}). Everything is saved; its log "
                    f"ends with:\n{server.tail()}"
                ) from error
            except ServerLost:
                server.close()  # what is left of it may hold memory
            self._asleep.add(server.url)

    # Answers

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """An answer to each request, in their order; those of servers that died are asked again."""
        self._wake()
        model = MODEL if self._handover is None else self._handover.model
        bodies = [{**body, "model": model} for body in bodies]
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
        self._sleep()
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
