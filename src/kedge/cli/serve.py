"""`kedge serve`: a model behind HTTP."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from kedge.cli.screen import out


def serve(
    model: Annotated[
        str, typer.Argument(help="An alias, a folder, a hub id, or the stage that made a model or a reward model.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback are seen by others.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    name: Annotated[str | None, typer.Option(help="What requests name as the model; else MODEL as given.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Answers at once; else as many as have room.")] = None,
    queue: Annotated[int, typer.Option(min=1, help="Answers that may wait; more are refused for now.")] = 1024,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File of the token; one that is not there is made.")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="Of a reward model with several.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto",
) -> None:
    """Serve a model: OpenAI's API for answers, or the scores of a reward model."""
    from kedge.commands import serve as serving

    console = out()
    served = serving.Serving(
        model=model,
        name=name,
        rows=rows or "auto",
        queue=queue,
        objective=objective,
        chat_template=chat_template,
        device=device,
        dtype=dtype,
    )
    with suppress(KeyboardInterrupt):
        serving.serve(
            served,
            host=host,
            port=port,
            token_file=token_file,
            say=lambda text: console.print(text, markup=False, soft_wrap=True),
        )
