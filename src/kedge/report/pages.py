"""HTML pages that look alike and stand alone: one stylesheet, inlined; no script, font or picture from outside.

Everything that comes from data is escaped. What a page says is in its own template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from kedge.core.quoting import escaped
from kedge.report.chat import Turn

_QUOTED = re.compile(r"`([^`]+)`")


def render_page(package: str, template: str, **values: Any) -> str:
    """The page that `template`, a file of `package`, makes of `values`; it puts `{{ style }}` into its head."""
    style = asset("kedge.report", "page.css") + asset("kedge.report.charts", "chart.css")
    page = _compiled(package, template).render(style=style, conversation=conversation, **values)
    return escaped(page)  # names and answers of others turn no line around, and a browser drops no control character


@cache
def _compiled(package: str, template: str) -> Template:
    """Compiling takes longer than a short run's page does, and a run writes its page after each stage."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = marked
    return environment.from_string(_text(package, template))


def conversation(turns: Iterable[Turn]) -> Markup:
    """The turns of a conversation, each with who speaks.

    >>> str(conversation([Turn(role="user", text="a < b?")]))
    '<div class="turns"><p class="turn user"><b>user</b> a &lt; b?</p></div>'
    """
    turn_of = Markup('<p class="turn {}">{}{}</p>')
    lines = [
        turn_of.format(turn.role, Markup("<b>{}</b> ").format(turn.role) if turn.role else "", turn.text)
        for turn in turns
    ]
    return Markup('<div class="turns">{}</div>').format(Markup("").join(lines))


def asset(package: str, name: str) -> Markup:
    """A style or script of ours: it is not data, so its quotes stay quotes."""
    return Markup(_text(package, name))


def marked(text: str) -> Markup:
    """Text with its `commands` set as code.

    >>> str(marked("Use `a < b`, not <b>."))
    'Use <code>a &lt; b</code>, not &lt;b&gt;.'
    """
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
