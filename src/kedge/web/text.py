"""Texts of models in pages: data, never markup. Shown as text; as Markdown on demand, with nothing that could act.

Markdown with HTML off, links and pictures as words; after that only a few harmless tags are left, no attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from kedge.core.quoting import escaped

TAGS = frozenset(
    {
        *("p", "br", "hr", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "h4", "h5", "h6"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
)
_MOST = 200_000
"""Characters that are read as Markdown; more is shown as text."""
_READER = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable(["table", "strikethrough"])
_LOWER = {"h1": "h4", "h2": "h5"}
"""Headings of an answer stand below those of the page."""


@lru_cache(maxsize=512)
def markdown(text: str) -> Markup:
    """A text as harmless HTML.

    >>> str(markdown("**a** <b>b</b> [c](javascript:d) ![e](f)")).strip()
    '<p><strong>a</strong> &lt;b&gt;b&lt;/b&gt; [c](javascript:d) e (f)</p>'
    >>> str(markdown("[shop](https://example.org)")).strip()
    '<p>shop (https://example.org)</p>'
    """
    if len(text) > _MOST:
        return Markup("<p>{}</p>").format(escaped(text))
    tokens = _READER.parse(escaped(text))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = _LOWER.get(token.tag, "h6")
        if token.children is not None:
            token.children = _without_links(token.children)
    html = _READER.renderer.render(tokens, _READER.options, {})
    return Markup(nh3.clean(html, tags=set(TAGS), attributes={}, link_rel=None, strip_comments=True))


def _without_links(tokens: Sequence[Token]) -> list[Token]:
    """Links as their words and their address; pictures as what they are said to show."""
    plain: list[Token] = []
    addresses: list[str] = []
    for token in tokens:
        if token.type == "link_open":
            addresses.append(str(token.attrs.get("href", "")))
        elif token.type == "link_close":
            plain.append(_words(f" ({addresses.pop()})"))
        elif token.type == "image":
            plain.append(_words(f"{token.content} ({token.attrs.get('src', '')})"))
        else:
            plain.append(token)
    return plain


def _words(text: str) -> Token:
    return Token(type="text", tag="", nesting=0, content=text)
