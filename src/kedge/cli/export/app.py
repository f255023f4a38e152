"""`kedge export`: a model for other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from kedge.cli.screen import out, print_json


def export(
    model: Annotated[
        str, typer.Argument(help="A run (its last policy), a stage, a model folder, an alias or a hub id.")
    ],
    to: Annotated[
        Literal["hf", "gguf", "adapter", "vllm", "ollama"],
        typer.Option("--to", help="Who is to read it: transformers, llama.cpp, peft, vLLM or Ollama."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; else NAME-TARGET here.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights for hf (else as they were saved) and vllm (else bfloat16)."),
    ] = None,
    quantise: Annotated[
        Literal["f16", "q8_0"] | None, typer.Option(help="Of the matrices for gguf and ollama; else f16.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Also to this repository of the hub (token in HF_TOKEN), private.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody may see it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Export a model, compared with its source: whole, or not at all."""
    from kedge.commands.export.run import ExportRequest, summary
    from kedge.commands.export.run import export as run_export

    exported = run_export(
        ExportRequest(
            model=model,
            to=to,
            output=output,
            dtype=dtype,
            quantise=quantise,
            push=push,
            public=public,
            force=force,
        )
    )
    if as_json:
        print_json({**asdict(exported), "folder": str(exported.folder)})
        return
    for line in summary(exported):
        out().print(line, markup=False, soft_wrap=True)
