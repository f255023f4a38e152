"""`kedge gate` and `kedge promote`: may this model go out, and under which name did it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kedge.cli.screen import out, print_json, writing
from kedge.core.errors import ConfigError
from kedge.core.files import refuse_overwriting

DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
]
Reserved = Annotated[bool, typer.Option("--reserved", help="Decide by the items that are kept for a promotion.")]


def gate(
    candidate: Annotated[str | None, typer.Argument(help="The model that should go out, or its run or stage.")] = None,
    baseline: Annotated[str | None, typer.Argument(help="The model that it must not be worse than.")] = None,
    sources: Annotated[
        list[Path] | None, typer.Option("--from", help="A folder that exam or evaluate has filled; may be repeated.")
    ] = None,
    rules: Annotated[Path, typer.Option("--rules", help="The file of rules.")] = Path("gate.yaml"),
    write_rules: Annotated[
        Path | None,
        typer.Option("--write-rules", help="Write rules to this file, and end; with --from, for what is there."),
    ] = None,
    undecided: Annotated[
        Literal["block", "allow"], typer.Option(help="Whether an undecided verdict ends with exit code 3 too.")
    ] = "block",
    reserved: Reserved = False,
    badcases: Annotated[Path, typer.Option(help="The folder of badcases.")] = Path("badcases"),
    ledger: Annotated[Path, typer.Option(help="Where looks at exams are counted.")] = Path("models/looks.jsonl"),
    to: Annotated[Path, typer.Option("--to", help="Where to write the verdict.")] = Path("verdict.json"),
    seed: Annotated[int, typer.Option(min=0, help="Of the answers to badcases.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to a badcase.")] = 256,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: DType = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The verdict as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a verdict that is there.")] = False,
) -> None:
    """Decide by rules whether a model may go out; exit code 3 where it may not."""
    from kedge.commands import gate as gating

    console = out()
    if write_rules is not None:
        with writing(write_rules):
            gating.write_rules(write_rules, sources or ())
        return _print([f"wrote {write_rules}"])
    if candidate is None or baseline is None or not sources:
        raise ConfigError(
            "kedge gate CANDIDATE BASELINE --from FOLDER: two models, and what exam or evaluate stages say of them; "
            "kedge gate --write-rules gate.yaml writes rules"
        )
    refuse_overwriting([to], inputs=[rules, *sources], force=force, own=["verdict.json"])
    with writing(to):
        verdict, notes = gating.decide(
            candidate,
            baseline,
            sources,
            rules=rules,
            badcases=badcases,
            ledger=ledger,
            is_reserved=reserved,
            out=to,
            sampling=gating.Sampling(
                seed=seed, device=device, dtype=dtype, chat_template=chat_template, max_new_tokens=max_new_tokens
            ),
            say=lambda line: None if as_json else console.print(line, markup=False, soft_wrap=True),
        )
    if as_json:
        print_json(gating.verdict_facts(verdict))
    else:
        _print([*gating.table_lines(verdict), *notes, f"wrote {to}"])
    gating.refuse(verdict, undecided=undecided, file=to)


def _print(lines: list[str]) -> None:
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)


def promote(
    model: Annotated[str | None, typer.Argument(help="The model, or the run or stage that made it.")] = None,
    alias: Annotated[str, typer.Option("--as", help="The name under which it goes out.")] = "",
    verdict: Annotated[
        list[Path] | None,
        typer.Option("--verdict", help="Its verdict; unless given, those of its run and verdict.json here."),
    ] = None,
    override: Annotated[
        str, typer.Option("--override", help="Promote without a passing verdict; the reason stays in the registry.")
    ] = "",
    registry: Annotated[Path, typer.Option(help="Where promotions are kept.")] = Path("models/registry.jsonl"),
    show: Annotated[bool, typer.Option("--list", help="Show what was promoted.")] = False,
) -> None:
    """Let a model go out under a name; refused without a passing verdict for exactly its weights."""
    from kedge.commands import gate as gating

    if show:
        lines = gating.promotion_lines(registry) or [f"{registry}: nothing was promoted"]
    elif model is None or not alias:
        raise ConfigError("kedge promote MODEL --as NAME, or kedge promote --list")
    else:
        with writing(registry):
            entry = gating.promote_model(
                model, alias=alias, verdicts=verdict or (), registry=registry, override=override
            )
        how = f"OVERRIDE by {entry.by}: {entry.override}" if entry.override else f"verdict {entry.verdict}"
        lines = [f"{entry.model.path} ({entry.model.weights}) is {entry.alias}: {how}", f"wrote {registry}"]
    _print(lines)
