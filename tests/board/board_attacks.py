"""Texts that would become code in a careless page, put everywhere on a board: prompts, answers, names, reasons."""

from __future__ import annotations

import json
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from board_files import fill_exam
from gate_files import rows_of

from kedge.commands.board.command import BoardRequest, make_board, write_board
from kedge.gate.badcases import Badcase, add_badcase
from kedge.gate.checks import parse_check
from kedge.gate.registry import promote
from kedge.gate.verdict import GatedModel

CASES = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 1</script>",
    "</pre></article><img src=x onerror='window.pwned = 1'>",
    '"><svg onload="window.pwned = 1">',
    "' onmouseover='window.pwned = 1' autofocus onfocus='window.pwned = 1",
    "</title></style><iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
    "<a href='javascript:window.pwned = 1'>here</a>",
    "{{ cycler.__init__.__globals__.os.system('true') }}{% for x in () %}",
    "&lt;script&gt;window.pwned = 1&lt;/script&gt;",
    "<base href='https://example.org/'><link rel=stylesheet href=//example.org/x.css>",
    "<meta http-equiv=refresh content='0;url=https://example.org'>",
    "<style>* { background: url(https://example.org/x) }</style>",
    "<!--><img src=x onerror=window.pwned=1>-->",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1>",
    "\u202e<script>window.pwned = 1</script>\x1b]0;title\x07",
)
_TAGS = """
html head meta link title style body header p h1 h2 h3 div section table thead tbody tr th td b br span code details
summary form label input select option kbd output article pre button script figure figcaption svg g line circle path
text
"""
ALLOWED = frozenset(_TAGS.split())
_OWN = {"meta": 3, "link": 1, "style": 1, "script": 1, "title": 1}


class _Tags(HTMLParser):
    """Everything in a page that is not text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def hostile_page(folder: Path, text: str) -> Path:
    """A board with this text wherever text of others can be."""
    scores = {f"base {text}": [1.0] * 6, f"new {text}": [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]}
    rows = rows_of("mmlu", "letter", scores, groups=[{"language": text if n % 2 else "en"} for n in range(6)])
    texts = {f"prompt mmlu-{number}": text for number in range(6)}
    texts |= {f"answer {model} mmlu-{number}": f"{text} {number}" for model in scores for number in range(6)}
    fill_exam(folder / "exams", rows, texts)
    about = json.loads((folder / "exams" / "exam.json").read_text())
    about["exams"]["mmlu"]["metrics"]["letter"]["summary"] = text
    about["exams"]["mmlu"]["items_hash"] = text
    (folder / "exams" / "exam.json").write_text(json.dumps(about))
    (folder / "exams" / "verdict.json").write_text(json.dumps({"format": text}))
    model = GatedModel(name=text, path=text, weights=text, content=text)
    promote(folder / "registry.jsonl", alias=text, model=model, verdicts=[], by=text, override=text)
    case = Badcase(
        id="case-1",
        prompt=(("user", text),),
        bad=text,
        why=text,
        check=parse_check({"lacks": text}, where="check"),
        severity="block",
        samples=1,
        needed=1,
    )
    add_badcase(folder / "badcases", case)
    request = BoardRequest(paths=[folder / "exams"], registry=folder / "registry.jsonl", badcases=folder / "badcases")
    return write_board(make_board(request), folder / "board.html")


def attempt(case: str) -> str | None:
    """None where the text stayed text."""
    with tempfile.TemporaryDirectory() as folder:
        page = hostile_page(Path(folder), case).read_text()
    parsed = _Tags()
    parsed.feed(page)
    if strange := set(parsed.tags) - ALLOWED:
        return f"tags of others: {sorted(strange)}"
    if wrong := {tag: parsed.tags.count(tag) for tag, count in _OWN.items() if parsed.tags.count(tag) != count}:
        return f"more of these tags than the page has: {wrong}"
    if events := [name for name, _ in parsed.attributes if name.startswith("on") or name in ("srcdoc", "style")]:
        return f"attributes that run or style: {events}"
    if far := [value for name, value in parsed.attributes if name in ("href", "src", "action") and value != "data:,"]:
        return f"addresses: {far}"
    return None
