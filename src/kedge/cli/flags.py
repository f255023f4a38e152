"""Commands as typer builds them, but for two things.

Help shows a flag as a flag: `--resume`, without a type that looks as if a value had to follow. And what an error says
of the command line is escaped as our own messages are.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from kedge.core.quoting import one_line

_LONGEST_MESSAGE = 500
_UsageError: Any = typer.BadParameter.__base__
"""What all errors of the command line are; which package it is in depends on typer's version."""


def _as_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params


class FlagCommand(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _as_flags(super().get_params(ctx))


class FlagGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _as_flags(super().get_params(ctx))

    def make_context(self, *args: Any, **named: Any) -> Any:
        with _errors_escaped():
            return super().make_context(*args, **named)

    def invoke(self, ctx: Any) -> Any:
        with _errors_escaped():
            return super().invoke(ctx)


@contextmanager
def _errors_escaped() -> Generator[None]:
    """Arguments that are quoted in a usage error neither move the cursor nor turn lines around nor fill the screen."""
    try:
        yield
    except _UsageError as error:
        error.message = one_line(error.message, _LONGEST_MESSAGE)
        raise


def show_flags(app: typer.Typer) -> None:
    """For every command of an app and of the apps inside it."""
    own: Any = app.info.cls
    if not (isinstance(own, type) and issubclass(own, FlagGroup)):
        app.info.cls = FlagGroup
    for command in app.registered_commands:
        command.cls = FlagCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            show_flags(group.typer_instance)
