"""Help that shows a flag as a flag: `--resume`, without a type that looks as if a value had to follow."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


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


def show_flags(app: typer.Typer) -> None:
    """For every command of an app and of the apps inside it."""
    app.info.cls = FlagGroup
    for command in app.registered_commands:
        command.cls = FlagCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            show_flags(group.typer_instance)
