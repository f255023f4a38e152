"""The site is built strictly, says what GitHub shows, keeps the order of the index, and loads nothing from outside."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/site"))
import hooks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")
BLOCKS = {"h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "table", "th", "td", "pre", "blockquote"}
TAGS = BLOCKS | {"a", "code", "em", "img", "strong"}


def config_of(site: Path, **changes: Any) -> MkDocsConfig:
    return load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True, **changes)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MkDocsConfig:
    return config_of(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def site(config: MkDocsConfig) -> Path:
    """The folder of the built site; any warning has ended the build."""
    build(config)
    return Path(config.site_dir)


def html_of(site: Path, page: Path) -> str:
    place = page.relative_to(DOCS).with_suffix(".html")
    return (site / place.with_name(place.name.replace("README", "index"))).read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Tags that carry meaning, each with the text behind it; what the theme adds to headings is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [["", ""]]
        self.is_added = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_added = ("class", "headerlink") in attrs
        if tag in TAGS and not self.is_added and (tag, self.parts[-1]) != ("code", ["pre", ""]):
            self.parts.append([tag, ""])

    def handle_endtag(self, tag: str) -> None:
        if tag in TAGS - {"code"} and not self.is_added:
            self.parts.append([f"/{tag}", ""])
        self.is_added = False

    def handle_data(self, data: str) -> None:
        if not self.is_added:
            self.parts[-1][1] += data


def outline_of(html: str) -> list[str]:
    outline = Outline()
    outline.feed(html)
    return [f"{tag}: {' '.join(text.split())}".strip() for tag, text in outline.parts]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(DOCS)) for page in PAGES])
def test_a_page_reads_as_on_github(site: Path, config: MkDocsConfig, page: Path) -> None:
    (article,) = re.findall(r"<article[^>]*>(.*?)</article>", html_of(site, page), re.DOTALL)
    text = hooks.site_links(page.read_text(encoding="utf-8"), str(page.parent.relative_to(DOCS)), config)
    github = MarkdownIt("commonmark").enable("table").render(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    assert outline_of(article) == outline_of(github)


def test_turning_pages_goes_through_all_in_the_order_of_the_index(site: Path) -> None:
    page, turned = site / "index.html", list[str]()
    while following := re.findall(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next"', page.read_text()):
        page = (page.parent / following[0]).resolve()
        turned.append(page.relative_to(site.resolve()).as_posix())
    decisions = ["decisions/index.html", *(f"decisions/{file.stem}.html" for file in sorted(DOCS.glob("decisions/0*")))]
    listed = re.findall(r"\]\((\w[^)#]*\.md|decisions)\)", INDEX)
    expected = [decisions if name == "decisions" else [name.replace(".md", ".html")] for name in listed]
    assert turned == [name for names in expected for name in names]


def test_the_groups_of_the_index_are_the_tabs(site: Path) -> None:
    (tabs,) = re.findall(r'<nav class="md-tabs".*?</nav>', html_of(site, DOCS / "README.md"), re.DOTALL)
    assert re.findall(r">\s*(\w+)\s*</a>", tabs) == ["Pages", *re.findall(r"^\*\*(\w+)\*\*$", INDEX, re.MULTILINE)]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"?(\w+:[^\"> ]+)", page.read_text())
        assert [url for url in loaded if not url.startswith("data:")] == [], page
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(), sheet


def test_links_that_lead_nowhere_and_pages_that_the_index_has_not_end_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/README.md").write_text("# Index\n\n**Do**\n\n1. [a.md](a.md)\n")
    bad = ("b.md", "a.md#nowhere", "/a.md", "nothing", "a.png")
    (tmp_path / "docs/a.md").write_text("# A\n\n" + "".join(f"- ![x]({link})\n- [x]({link})\n" for link in bad))
    (tmp_path / "docs/c.md").write_text("# C\n")
    with pytest.raises(Abort, match="strict mode"):
        build(config_of(tmp_path / "site", docs_dir=str(tmp_path / "docs")))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [link for link in bad if not any(f"'{link}'" in text and "'a.md'" in text for text in warned)] == []
    assert any("c.md" in text and "not included in the" in text for text in warned)


@pytest.mark.parametrize(
    ("repository", "text", "expected"),
    [
        ("https://h/o/r", "[the loop](../recipes/loop.yaml)", "[the loop](https://h/o/r/blob/main/recipes/loop.yaml)"),
        ("https://h/o/r/", "[b](../CHANGELOG.md#c)", "[b](https://h/o/r/blob/main/CHANGELOG.md#c)"),
        (None, "[the loop](../recipes/loop.yaml)", "the loop (`recipes/loop.yaml`)"),
        (None, "[kedge.core.stage](../src/kedge/core/stage.py)", "`src/kedge/core/stage.py`"),
        (None, "[`CHANGELOG`](../CHANGELOG.md#c)", "`CHANGELOG.md`"),
        (None, "[why](decisions)", "[why](decisions/README.md)"),
        (None, "[ppo.md](ppo.md#kl)", "[PPO with four roles](ppo.md#kl)"),
        (None, "[PPO](ppo.md) [b](https://h/a.md) ![c](../c.svg)", "[PPO](ppo.md) [b](https://h/a.md) ![c](../c.svg)"),
    ],
)
def test_links_of_the_site(
    config: MkDocsConfig, monkeypatch: pytest.MonkeyPatch, repository: str | None, text: str, expected: str
) -> None:
    monkeypatch.setitem(config.data, "repo_url", repository)
    assert hooks.site_links(text, "", config) == expected


def test_lists_get_their_blank_line_and_code_does_not() -> None:
    text = "A:\n- b\n- c\n\n```text\nA:\n- b\n```\n    A\n- b\n# H\n- b"
    assert hooks.spaced_lists(text) == text.replace("A:\n- b\n- c", "A:\n\n- b\n- c")
