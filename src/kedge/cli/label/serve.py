"""`kedge label serve`: the pages on which people label."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.label.opening import NO_ADDRESS, Database, opened, say
from kedge.core.errors import ConfigError


def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    team: Annotated[bool, typer.Option("--team", help="Accounts and roles, behind TLS.")] = False,
    url: Annotated[str, typer.Option(help="Of a team: the public address, https://labels.example.org.")] = "",
    host: Annotated[str, typer.Option(help="Of a team: the address of this machine to listen at.")] = "127.0.0.1",
    tls_cert: Annotated[Path | None, typer.Option(help="Of a team: the certificate, a PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Of a team: its key.")] = None,
    behind_proxy: Annotated[
        list[str] | None, typer.Option(help="Of a team: a proxy that ends TLS, by address or network; repeatable.")
    ] = None,
    chat: Annotated[
        list[str] | None, typer.Option(help="A served model to talk with, NAME=URL; two or more make an arena.")
    ] = None,
    chat_key: Annotated[str, typer.Option(help="The variable that holds the token of their servers.")] = "KEDGE_TOKEN",
    watch: Annotated[list[Path] | None, typer.Option(help="A run to follow beside the labels; repeatable.")] = None,
    board: Annotated[
        list[Path] | None, typer.Option(help="A run, exams or verdicts for the board beside the labels; repeatable.")
    ] = None,
    db: Database = NO_ADDRESS,
) -> None:
    """Serve the pages: for one person on this machine, or with --team for people with accounts."""
    from kedge.commands import label_pages

    chosen = {"--url": url, "--tls-cert": tls_cert, "--tls-key": tls_key, "--behind-proxy": behind_proxy}
    if not team and (lost := [name for name, value in chosen.items() if value]):
        raise ConfigError(f"{', '.join(lost)}: without --team the pages are for this machine alone; add --team")
    settings = label_pages.TeamSettings(
        url=url, host=host, tls_cert=tls_cert, tls_key=tls_key, behind_proxy=behind_proxy or ()
    )
    if team:
        label_pages.check_team(settings)
    hosted = label_pages.Hosted(chat=chat or (), chat_key=chat_key, watch=watch or (), board=board or ())
    with opened(db) as store, suppress(KeyboardInterrupt):
        if team:
            label_pages.serve_team(store, settings, port=port, say=say, hosted=hosted)
        else:
            label_pages.serve_locally(store, port=port, say=say, hosted=hosted)
