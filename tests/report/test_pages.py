"""Pages stand alone and share one look."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.report.pages import marked, render_page


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one template."""
    folder = tmp_path / "package_with_a_page"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "page.html.j2").write_text("<style>{{ style }}</style><p>{{ text }}</p><p>{{ text | marked }}</p>")
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


def test_style_is_inlined_as_it_is_and_data_are_escaped(package: str) -> None:
    page = render_page(package, "page.html.j2", text="<i> `a & b`")
    assert '"Segoe UI"' in page
    assert "@media (prefers-color-scheme: dark)" in page
    assert page.endswith("<p>&lt;i&gt; `a &amp; b`</p><p>&lt;i&gt; <code>a &amp; b</code></p>")


def test_the_style_asks_for_nothing_from_outside(package: str) -> None:
    page = render_page(package, "page.html.j2", text="")
    assert not {word for word in ("url(", "@import", "http", "</style><s") if word in page}


def test_a_lone_backtick_is_left_alone() -> None:
    assert str(marked("5` and <b>")) == "5` and &lt;b&gt;"


def test_text_of_others_turns_no_line_around(package: str) -> None:
    page = render_page(package, "page.html.j2", text="a\x1b[2J\u202eb")
    assert page.endswith("<p>a\\x1b[2J\\u202eb</p><p>a\\x1b[2J\\u202eb</p>")
