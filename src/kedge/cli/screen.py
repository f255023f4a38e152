"""What commands print with: rich on a terminal, plain lines without one."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kedge.core.errors import KedgeError
from kedge.core.findings import Finding
from kedge.core.quoting import escaped, escaped_json

_MARKS = {"ok": "[green]✓[/]", "info": "[blue]i[/]", "warning": "[yellow]![/]", "fatal": "[bold red]✗[/]"}

_FREE_SPACE = "; free some space, then try again (a run goes on with --resume)"
_OTHER_PLACE = "; choose a place that you may write to"
_WAYS_OUT = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EACCES: _OTHER_PLACE,
    errno.EPERM: _OTHER_PLACE,
    errno.EROFS: _OTHER_PLACE,
    errno.EFBIG: "; raise the limit of file sizes (ulimit -f), then try again (a run goes on with --resume)",
    errno.ELOOP: "; a symbolic link leads back to itself: remove it",
    errno.ENAMETOOLONG: "; choose a shorter name",
}


class _Screen(Console):
    """A console on which text is only seen: what it holds of others steers neither terminal nor colours."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


def out() -> Console:
    return _Screen(highlight=False, emoji=False)


def errors_to() -> Console:
    return _Screen(stderr=True, highlight=False, emoji=False)


def print_error(text: str) -> None:
    errors_to().print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)


def print_json(value: Any) -> None:
    """Machine-readable output goes out as it is, without colours or wrapping."""
    print(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def tell(console: Console, text: str, *, indent: str = "", mark: str = "") -> None:
    """One line of markup; a terminal wraps it under its own beginning, a file or pipe gets it whole."""
    lead = indent + (f"{mark} " if mark else "")
    if not lead or not console.is_terminal:
        console.print(lead + text, soft_wrap=not console.is_terminal)
        return
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(lead, text)
    console.print(grid)


def print_findings(console: Console, findings: Iterable[Finding], *, indent: str = "  ") -> None:
    """One line a finding, worst first, with the places and what to do below it."""
    order = {"fatal": 0, "warning": 1, "info": 2, "ok": 3}
    for finding in sorted(findings, key=lambda one: order[one.level]):
        has_many = ", " in finding.where
        where = f"[dim]{escape(finding.where)}:[/] " if finding.where and not has_many else ""
        tell(console, f"{where}{escape(finding.message)}", indent=indent, mark=_MARKS[finding.level])
        if has_many:
            tell(console, f"[dim]{escape(finding.where)}[/]", indent=indent + "    ")
        if finding.fix and finding.level in ("warning", "fatal"):
            tell(console, f"[dim]{escape(finding.fix)}[/]", indent=indent + "    ", mark="[dim]→[/]")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """A disk that refuses does not say where, or names a file that is gone by now: then `path` is named, and a way."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, KedgeError) and (not error.filename or str(error.filename).endswith(".partial")):
            error.filename = str(path)
            error.strerror = f"{error.strerror or error}{_WAYS_OUT.get(error.errno or 0, '')}"
        raise


class _Rate(ProgressColumn):
    """Items a second, since the start."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:,.0f}/s" if task.elapsed else "", style="dim")


@contextmanager
def counter(noun: str, *, is_quiet: bool = False) -> Generator[Callable[[int], None]]:
    """Counts up on the terminal while the total is unknown; gives a function that takes the number done so far."""
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} " + noun), _Rate(), TimeElapsedColumn())
    with Progress(
        *columns, console=errors_to(), transient=True, disable=is_quiet or not errors_to().is_terminal
    ) as bar:
        task = bar.add_task(noun, total=None)
        yield lambda done: bar.update(task, completed=done)
