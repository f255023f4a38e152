"""`kedge watch`: runs followed until they end, in a terminal, as plain lines, or on a page for this machine alone."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.commands.listening import listen
from kedge.core.errors import PluginError
from kedge.report.live.feed import RunFeed
from kedge.report.live.terminal import PlainLines, view
from kedge.report.writing import run_folder
from kedge.runs.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kedge.stages.shared.context import Say

LOOK_EVERY_S = 1.0
ADDRESS = "127.0.0.1"


def open_feeds(runs: Sequence[Path]) -> list[RunFeed]:
    """One a run; a folder that is none is refused."""
    return [RunFeed(run_folder(run)) for run in runs]


def follow(feeds: Sequence[RunFeed], show: Callable[[RenderableType], None]) -> None:
    """Show the runs at once, then whenever there is something new, until none of them runs."""
    is_first = True
    while True:
        is_new = [feed.poll() for feed in feeds]
        if is_first or any(is_new):
            show(view([feed.record() for feed in feeds]))
        is_first = False
        if not _any_runs(feeds):
            return
        time.sleep(LOOK_EVERY_S)


def follow_plainly(feeds: Sequence[RunFeed], say: Say) -> None:
    """The same as lines, each of them once."""
    lines = [PlainLines() for _ in feeds]
    while True:
        for feed, own in zip(feeds, lines, strict=True):
            feed.poll()
            for line in own.new(feed.record()):
                say(line)
        if not _any_runs(feeds):
            return
        time.sleep(LOOK_EVERY_S)


@contextmanager
def beside(folder: Path, show: Callable[[RenderableType], None]) -> Generator[None]:
    """Show the run in `folder`, once it is there, while what is inside goes on in this process."""
    is_over = threading.Event()

    def look() -> None:
        feed: RunFeed | None = None
        while not is_over.wait(LOOK_EVERY_S):
            if feed is None and (folder / MANIFEST_NAME).is_file():
                feed = RunFeed(folder)
            if feed is not None and feed.poll():
                show(view([feed.record()]))

    thread = threading.Thread(target=look, name="kedge-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def serve(feeds: Sequence[RunFeed], *, port: int, say: Say) -> None:
    """A page on this machine until interrupted. Its address has a token that nobody can guess; port 0 is a free one."""
    try:
        import uvicorn

        from kedge.report.live.connections import TimedProtocol
        from kedge.report.live.web import make_app
    except ImportError as error:
        raise PluginError(f"kedge watch --web needs {error.name!r}: pip install 'kedge[web]'") from error
    token = secrets.token_urlsafe(24)
    with closing(listen(ADDRESS, port)) as listening:
        port = listening.getsockname()[1]
        app = make_app(feeds, token=token, hosts=(f"{ADDRESS}:{port}", f"localhost:{port}"))
        say(f"http://{ADDRESS}:{port}/?token={token}")
        say("This address works on this machine alone. Ctrl-C ends it; the runs go on.")
        # Its log of requests would have the token in every line.
        config = uvicorn.Config(app, http=TimedProtocol, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


def _any_runs(feeds: Sequence[RunFeed]) -> bool:
    return any(feed.record().status == "running" for feed in feeds)
