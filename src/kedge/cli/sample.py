"""`kedge sample`: answers of a model to a few prompts, or to a file of them."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from kedge.cli.screen import counter, out, print_json, tell, writing
from kedge.core.files import refuse_overwriting


def sample(
    model: Annotated[str, typer.Argument(help="An alias, a folder, a hub id, or the run or stage that made a model.")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="What to ask; may be repeated.")] = None,
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="A file of prompts, or of anything with them.")
    ] = None,
    answers: Annotated[int, typer.Option("--answers", "-n", min=1, help="Answers to each prompt.")] = 1,
    best_of: Annotated[int | None, typer.Option("--best-of", min=2, help="Show the best of so many answers.")] = None,
    reward: Annotated[
        str | None, typer.Option("--reward", help="Who says which is best: a reward model, or its run or stage.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens with so much mass.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 1 is greedy.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; unless given 256, or what the model's window leaves.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="An answer ends where it contains this text.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto",
    to: Annotated[
        Path | None, typer.Option("--to", help="Write the answers there: .jsonl, .jsonl.gz, .parquet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable answers.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (never what is read).")
    ] = False,
) -> None:
    """Sample answers; the same seed gives the same ones."""
    from kedge.commands import sample as sampling

    sampling.refuse_target(to)
    refuse_overwriting([to], inputs=[model, *([prompts] if prompts else [])], force=force)
    judge = sampling.judge_for(best_of, reward, answers, device=device)
    answers = best_of or answers
    asked = sampling.asked_prompts(prompt or (), prompts)
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens}
    with counter(f"of {len(asked) * answers:,} answers", is_quiet=as_json) as progress:
        rows = sampling.sample_answers(
            model,
            asked,
            {**settings, "stop": stop},
            answers=answers,
            judge=judge,
            seed=seed,
            chat_template=chat_template,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    if to is not None:
        with writing(to):
            sampling.write_rows(to, rows)
    _show(rows, to, as_json)


def _show(rows: list[dict[str, Any]], to: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif to is None:
        _print(rows)
    else:
        out().print(f"wrote {len(rows):,} answers to {to}", markup=False, soft_wrap=True)


def _print(rows: list[dict[str, Any]]) -> None:
    """Prompt by prompt, its answers below it; of answers that were chosen from, the best."""
    for _, group in groupby(rows, key=lambda row: row["id"].partition("-")[0]):
        answers = list(group)
        tell(out(), f"[bold]{escape(answers[0]['prompt'][-1]['content'])}[/]")
        shown = [row for row in answers if row.get("best", True)]
        for row in shown:
            how = f"{row['length']:,} tokens" + ("" if row["finished"] else ", cut off") + _choice(row)
            tell(out(), f"{escape(row['answer'])} [dim]({how})[/]", indent="  ", mark="•")
        if not shown:
            tell(out(), f"[dim]none of {len(answers)} answers has a score: {escape(answers[0]['unscored'])}[/]")


def _choice(row: dict[str, Any]) -> str:
    if "best" not in row:
        return ""
    return f"; scores {row['score']:.3f}, the best of {row['best_of']}: {row['kl']:.2f} nats from one answer, at most"
