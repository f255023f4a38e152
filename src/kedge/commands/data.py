"""What `kedge data` does: the audit with a model's tokenizer beside it, and the doors to converting and splitting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kedge.core.errors import ConfigError
from kedge.core.files import write_text
from kedge.core.suggest import did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kedge.data.auditing import Audit
    from kedge.data.converting import Converted
    from kedge.data.splitting import Split


def check_files(
    files: Sequence[str],
    *,
    heldout: Sequence[str] = (),
    evaluation: Sequence[str] = (),
    model: str | None = None,
    window: int | None = None,
    max_broken: float = 0.01,
    near_threshold: float = 0.8,
    columns: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Audit files; with a model, also count its tokens, look for its control tokens and check its template."""
    from kedge.data.auditing import audit

    if model is None and window is not None:
        raise ConfigError(f"--window {window}: tokens can only be counted with a tokenizer; name one with --model")
    if model is None:
        return audit(
            files,
            heldout=heldout,
            evaluation=evaluation,
            max_broken=max_broken,
            near_threshold=near_threshold,
            columns=columns,
            progress=progress,
        )
    from kedge.data.preflight import preflight
    from kedge.data.preflight_examples import measure
    from kedge.data.tokenizer import load_tokenizer
    from kedge.models.loading.describe import describe
    from kedge.models.loading.resolve import resolve

    facts = describe(model)
    tokenizer = load_tokenizer(resolve(model))
    report = audit(
        files,
        heldout=heldout,
        evaluation=evaluation,
        measure=measure(tokenizer),
        window=window or facts.window,
        special_tokens=tuple(tokenizer.all_special_tokens),
        max_broken=max_broken,
        near_threshold=near_threshold,
        columns=columns,
        progress=progress,
    )
    about_model = preflight(tokenizer, config_vocab_size=facts.vocab_size, window=facts.window)
    return report.with_findings(about_model)


def render(audit: Audit) -> RenderableType:
    """The audit for a terminal."""
    from kedge.data.auditing import render_terminal

    return render_terminal(audit)


def save_html(audit: Audit, file: Path) -> None:
    """The audit as one page that opens offline."""
    from kedge.data.auditing.rules import RULES
    from kedge.report.audit import render_audit

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render_audit(audit, reasons={code: rule.reason for code, rule in RULES.items()}))


def named_columns(pairs: Sequence[str], ignore: Sequence[str]) -> dict[str, Any]:
    """`--column prompt=question` and `--ignore score` as the `columns` of a recipe."""
    columns: dict[str, Any] = {"ignore": list(ignore)} if ignore else {}
    for pair in pairs:
        part, sign, name = pair.partition("=")
        if not sign:
            raise ConfigError(f"--column {pair}: write PART=COLUMN, as in --column prompt=question")
        columns[part.strip()] = name.strip()
    return columns


def convert_file(
    source: str,
    to: Path | None,
    *,
    kind: str | None,
    max_broken: float,
    columns: Mapping[str, Any] | None = None,
    limit: int | None = None,
    force: bool = False,
) -> Converted:
    """Convert one file; without a target, into `<stem>.<kind>.jsonl` here."""
    from kedge.data.converting import convert
    from kedge.data.examples import Kind
    from kedge.data.reading import recognised
    from kedge.data.sources import stem_of

    kinds: tuple[Kind, ...] = get_args(Kind)
    if kind is not None and kind not in kinds:
        raise ConfigError(f"--kind {kind}: there is no such kind{did_you_mean(kind, kinds)}; one of {', '.join(kinds)}")
    target = to or Path(f"{stem_of(source)}.{kind or recognised(source, None, columns=columns).kind}.jsonl")
    return convert(source, target, kind=kind, max_broken=max_broken, columns=columns, limit=limit, force=force)


def split_files(
    sources: Sequence[str],
    to: Path,
    *,
    heldout: float,
    seed: int,
    by: str,
    max_broken: float,
    columns: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Split:
    from kedge.data.splitting import split

    return split(sources, to, heldout=heldout, seed=seed, by=by, max_broken=max_broken, columns=columns, force=force)


def make_instructions(to: Path, count: int, *, seed: int, kinds: Sequence[str], is_heldout: bool) -> list[str]:
    """Write prompts with checkable instructions; gives the kinds that they have."""
    from kedge.data.instructions.generate import generate
    from kedge.data.instructions.wordings import TRAINED, UNTRAINED, WORDINGS
    from kedge.data.writing import row_writer

    sets = {"trained": TRAINED, "untrained": UNTRAINED, "all": WORDINGS}
    named = list(dict.fromkeys(kind for name in kinds for kind in sets.get(name, (name,))))
    if unknown := [kind for kind in named if kind not in WORDINGS]:
        near = did_you_mean(unknown[0], [*WORDINGS, *sets])
        raise ConfigError(f"--kind {unknown[0]}: there is no such kind{near}; {', '.join(sets)}, or one of IFEval's")
    rows = generate(count, seed=seed, kinds=named, part="heldout" if is_heldout else "train")
    with row_writer(to) as write:
        for row in rows:
            write(row)
    return named
