"""`kedge chat`: talk with a model, or with two side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kedge.cli.screen import out, print_error
from kedge.core.errors import KedgeError

if TYPE_CHECKING:
    from kedge.commands.chat.model import Reply
    from kedge.commands.chat.session import Session, Show, Turn


def chat(
    models: Annotated[list[str], typer.Argument(help="One model, or two: runs, stages, folders, aliases, hub ids.")],
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[
        float, typer.Option(min=0, help="How freely answers are drawn; 0: the likeliest token.")
    ] = 0.7,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Keep the likeliest tokens with so much mass.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="The same seed and the same words give the same answers.")] = 0,
    feedback: Annotated[
        Path | None, typer.Option("--feedback", help="Verdicts go there; else chat-thumbs.jsonl or chat-pairs.jsonl.")
    ] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto",
) -> None:
    """Talk with a model, or compare two; verdicts are written as data for training."""
    from kedge.commands.chat.open import ChatRequest, open_chat

    session = open_chat(
        ChatRequest(
            models=models,
            system=system,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            feedback=feedback,
            chat_template=chat_template,
            device=device,
            dtype=dtype,
        )
    )
    console = out()
    if console.is_terminal:
        console.print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat", style="dim")
    for line in _lines(console):
        if line == "/quit":
            break
        if line:
            _do(session, line, console)


def _lines(console: Console) -> Iterator[str]:
    """What is typed, or piped in. Ctrl-C at the prompt drops the line."""
    is_typed = console.is_terminal and sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):
            import readline  # lines can be edited, and earlier ones called back

            del readline
    while True:
        try:
            line = input("› ") if is_typed else sys.stdin.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if not is_typed and not line:
            return
        yield line.strip()


def _do(session: Session, line: str, console: Console) -> None:
    """One line of a chat; what is wrong with it is told, and the chat goes on."""
    try:
        if line == "/again":
            _answer(session, session.again, console)
        elif line.startswith("/"):
            console.print(session.command(line), markup=False, style="dim", soft_wrap=True)
        else:
            _answer(session, lambda show, stop: session.ask(line, show, stop), console)
    except KedgeError as error:
        print_error(str(error))


def _answer(session: Session, ask: Callable[[Show, Event], Turn], console: Console) -> None:
    names, stop = [model.name for model in session.models], Event()
    if not console.is_terminal:
        turn = ask(lambda number, text: None, stop)
        for name, reply in zip(names, turn.replies, strict=True):
            lead = f"{name}: " if len(names) > 1 else ""
            console.print(f"{lead}{reply.text}{_note(reply)}", markup=False, soft_wrap=True)
    elif len(names) == 1:
        _streamed(ask, stop, console)
    else:
        _side_by_side(names, ask, stop, console)


def _streamed(ask: Callable[[Show, Event], Turn], stop: Event, console: Console) -> None:
    shown = 0

    def show(number: int, text: str) -> None:
        nonlocal shown
        console.print(text[shown:], end="", markup=False, soft_wrap=True)
        shown = len(text)

    turn = ask(show, stop)
    reply = turn.replies[0]
    console.print(f"{reply.text[shown:]}{_note(reply)}", markup=False, soft_wrap=True)


def _side_by_side(names: list[str], ask: Callable[[Show, Event], Turn], stop: Event, console: Console) -> None:
    texts = ["" for _ in names]
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(number: int, text: str) -> None:
            texts[number] = text
            live.update(_columns(names, texts), refresh=True)

        turn = ask(show, stop)
    console.print(_columns(names, [f"{reply.text}{_note(reply)}" for reply in turn.replies]))


def _columns(names: list[str], texts: list[str]) -> Table:
    table = Table(expand=True, show_lines=False)
    for name in names:
        table.add_column(Text(name), ratio=1, overflow="fold")
    table.add_row(*(Text(text) for text in texts))
    return table


def _note(reply: Reply) -> str:
    if reply.is_stopped:
        return " (stopped)"
    return "" if reply.is_finished else " (cut off)"
