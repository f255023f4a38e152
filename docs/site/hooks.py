"""What MkDocs needs to be told so that pages written for a repository are right on the site too.

The navigation is the order of docs/README.md. Links to files outside of docs/ lead to the repository where `repo_url`
of mkdocs.yml names one, and are names of files until then. Links to folders lead to the page of that folder, and links
that are file names get the titles of their pages. Lists get the blank line that the site's
renderer wants before them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

Nav = list[Any]
ENTRY = re.compile(r"^\*\*(?P<group>[^*]+)\*\*$|\]\((?P<target>[\w./-]+)\)", re.MULTILINE)
ITEM = re.compile(r"(?:[-*+]|1[.)]) +\S")
PARAGRAPH = re.compile(r"(?!#|\||[-*+] |\d+[.)] |```|<!--)\S")
LINK = re.compile(r"(?<!!)\[(?P<words>[^\]\n]*)\]\((?P<target>[\w./-]+)(?P<place>#[\w-]+)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation(Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["navigation", "toc"]  # it is the list of all pages itself
    return spaced_lists(site_links(markdown, posixpath.dirname(page.file.src_uri), config))


def navigation(docs: Path) -> Nav:
    """The groups of the index with their pages, in its order; a folder is a section of its own."""
    nav: Nav = [{"Pages": "README.md"}]
    pages: Nav = nav
    for found in ENTRY.finditer((docs / "README.md").read_text(encoding="utf-8")):
        if found["group"]:
            pages = []
            nav.append({found["group"]: pages})
        elif (docs / found["target"]).is_dir():
            pages.append(section(docs, found["target"]))
        elif found["target"].endswith(".md"):
            pages.append(found["target"])
    return nav


def section(docs: Path, folder: str) -> dict[str, Nav]:
    numbered = sorted(file.relative_to(docs).as_posix() for file in (docs / folder).glob("0*.md"))
    return {folder.capitalize(): [f"{folder}/README.md", *numbered]}


def site_links(markdown: str, folder: str, config: MkDocsConfig) -> str:
    """A page of `folder` with its links as the site needs them."""
    return LINK.sub(lambda link: site_link(link, folder, config), markdown)


def site_link(link: re.Match[str], folder: str, config: MkDocsConfig) -> str:
    target, place = posixpath.normpath(posixpath.join(folder, link["target"])), link["place"] or ""
    if (Path(config.docs_dir) / target / "README.md").is_file():
        return f"[{link['words']}]({link['target'].rstrip('/')}/README.md{place})"
    if not target.startswith("../"):
        words = title_of(Path(config.docs_dir) / target) if target.endswith(link["words"]) else link["words"]
        return f"[{words}]({link['target']}{place})"
    file = target.removeprefix("../")
    if config.repo_url:
        return f"[{link['words']}]({config.repo_url.rstrip('/')}/blob/main/{file}{place})"
    return f"`{file}`" if is_name_of(link["words"].strip("`"), file) else f"{link['words']} (`{file}`)"


def title_of(page: Path) -> str:
    """What stands in the place of a file's name, where a link has no other words."""
    if page.suffix != ".md" or not page.is_file():
        return page.name
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def is_name_of(words: str, file: str) -> bool:
    """Whether the words of a link say no more than the file does."""
    module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return words in (file, posixpath.basename(file), module, Path(file).stem)


def spaced_lists(markdown: str) -> str:
    """A blank line before each list that follows its paragraph at once: GitHub needs none, Python-Markdown does."""
    lines, is_code = list[str](), False
    for line in markdown.splitlines():
        is_code ^= line.startswith("```")
        if not is_code and ITEM.match(line) and lines and PARAGRAPH.match(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
