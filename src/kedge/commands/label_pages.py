"""What `kedge label serve` does: the pages of people's labels, for one person on this machine or for a team."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kedge.commands.board.command import BoardRequest, make_board
from kedge.commands.listening import listen
from kedge.commands.watch import open_feeds
from kedge.core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kedge.label.database import Store
    from kedge.stages.shared.context import Say
    from kedge.web.board import BadcaseDraft
    from kedge.web.entrance import Entrance

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSettings:
    """Where a team finds the pages, and how their connection is kept from others."""

    url: str
    """The public address, which links, Host and Origin are held to."""
    host: str = ADDRESS
    tls_cert: Path | None = None
    tls_key: Path | None = None
    behind_proxy: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What is served beside the labels."""

    chat: Sequence[str] = ()
    """Models to talk with, each NAME=URL."""
    chat_key: str = "KEDGE_TOKEN"
    """The variable that holds the key of their servers."""
    watch: Sequence[Path] = ()
    """Runs to follow, as `kedge watch --web` does."""
    board: Sequence[Path] = ()
    """What `kedge board` takes."""


def make_pages(entrance: Entrance, hosted: Hosted) -> FastAPI:
    """The application with all that is wanted beside the labels; what cannot be served is refused before it starts."""
    from kedge.web.app import Extras, make_app
    from kedge.web.chat_models import parse_chat_model

    key = os.environ.get(hosted.chat_key)
    models = [parse_chat_model(words, key) for words in hosted.chat]
    if len({model.name for model in models}) < len(models):
        raise ConfigError("--chat: two models have the same name; names are how votes are kept apart")
    request = BoardRequest(paths=hosted.board)
    if hosted.board:
        make_board(request)
    board = partial(make_board, request) if hosted.board else None
    badcase = partial(keep_badcase, request.badcases)
    extras = Extras(chat_models=models, feeds=open_feeds(hosted.watch), board=board, add_badcase=badcase)
    return make_app(entrance, extras)


def keep_badcase(folder: Path, draft: BadcaseDraft) -> str:
    """Add a badcase from the board to the folder that the board reads; returns its id."""
    from kedge.commands.gate import add_case, typed_check

    file, answer = draft.source
    case, _ = add_case(
        folder,
        Path(file),
        answer,
        why=draft.why,
        check=typed_check(draft.check, draft.value),
        severity=draft.severity,
        samples=3,
        needed=None,
        siblings=(),
        person=draft.person,
    )
    return case.id


def check_team(team: TeamSettings) -> None:
    """A team's pages are served over TLS or not at all."""
    parts = urlsplit(team.url)
    if parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"--url {team.url}: the public address is needed, https://HOST[:PORT] and nothing after it")
    if (team.tls_cert is None) != (team.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; name both files")
    if team.tls_cert is None and not team.behind_proxy:
        raise ConfigError(
            "--team: passwords and labels need TLS. Give --tls-cert and --tls-key, or --behind-proxy ADDRESS where a "
            "proxy with a certificate stands before this server"
        )
    if team.tls_cert is not None and team.behind_proxy:
        raise ConfigError("--tls-cert and --behind-proxy: TLS ends either here or at the proxy; give one of them")
    for name, file in (("--tls-cert", team.tls_cert), ("--tls-key", team.tls_key)):
        if file is not None and not file.is_file():
            raise ConfigError(f"{name} {file}: there is no such file")


def serve_locally(store: Store, *, port: int, say: Say, hosted: Hosted | None = None) -> None:
    """For one person on this machine until interrupted; port 0 is a free one."""
    try:
        import uvicorn

        from kedge.label.team.members import local_person
        from kedge.report.live.connections import TimedProtocol
        from kedge.web.entrance import Entrance, LocalEntrance
    except ImportError as error:
        raise PluginError(f"kedge label serve needs {error.name!r}: pip install 'kedge[label]'") from error
    token = secrets.token_urlsafe(24)
    with closing(listen(ADDRESS, port)) as listening:
        port = listening.getsockname()[1]
        origin = f"http://{ADDRESS}:{port}"
        local = LocalEntrance(token=token, person=local_person(store))
        entrance = Entrance(store=store, origin=origin, hosts=(f"{ADDRESS}:{port}",), local=local)
        app = make_pages(entrance, hosted or Hosted())
        say(f"{origin}/?token={token}")
        say("This address works on this machine alone, and for one person. Ctrl-C ends it; every judgment is kept.")
        # Its log of requests would have the token in every line.
        config = uvicorn.Config(app, http=TimedProtocol, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


def serve_team(store: Store, team: TeamSettings, *, port: int, say: Say, hosted: Hosted | None = None) -> None:
    """For people with accounts until interrupted."""
    check_team(team)
    try:
        import uvicorn

        from kedge.report.live.connections import TimedProtocol
        from kedge.web.entrance import Entrance, parse_proxies
    except ImportError as error:
        raise PluginError(f"kedge label serve needs {error.name!r}: pip install 'kedge[label]'") from error
    origin = team.url.rstrip("/")
    entrance = Entrance(
        store=store, origin=origin, hosts=(urlsplit(origin).netloc,), proxies=parse_proxies(team.behind_proxy)
    )
    with closing(listen(team.host, port)) as listening:
        say(f"{origin} is served at {team.host}:{listening.getsockname()[1]}")
        say(f"`kedge label invite PROJECT EMAIL --url {origin}` makes links for people. Ctrl-C ends it.")
        config = uvicorn.Config(
            make_pages(entrance, hosted or Hosted()),
            http=TimedProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # what a proxy says is read, and checked, by the guard
            ssl_certfile=None if team.tls_cert is None else str(team.tls_cert),
            ssl_keyfile=None if team.tls_key is None else str(team.tls_key),
        )
        uvicorn.Server(config).run(sockets=[listening])
