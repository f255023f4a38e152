"""A real Chromium, and pages opened in it: light, dark and as wide as a phone. Any console error fails the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill

LOOKS = {
    "light": {"width": 1100, "height": 900, "scheme": "light"},
    "dark": {"width": 1100, "height": 900, "scheme": "dark"},
    "phone": {"width": 360, "height": 740, "scheme": "light"},
}
OpenPage = Callable[..., Page]
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow much is it?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="session")
def browser() -> Generator[Browser]:
    """Debian's Chromium where there is one, else the one that `playwright install chromium` fetched."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that a container does not give; the pages are our own.
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Browser) -> Generator[OpenPage]:
    """Open an address in one of the three looks; at the end no page may have had an error or asked another host."""
    troubles, contexts = list[str](), []

    def make(url: str, look: str = "light") -> Page:
        about = LOOKS[look]
        context = browser.new_context(
            viewport={"width": about["width"], "height": about["height"]}, color_scheme=about["scheme"]
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        home = url.split("?")[0] if url.startswith("http") else "file:"
        page.on("request", lambda sent: None if sent.url.startswith((home, "data:")) else troubles.append(sent.url))
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A PPO run with two events; it has ended."""
    folder = tmp_path / "small"
    with Run.create(folder, manifest=new_manifest(name="small", kind="ppo", seed=1, settings=PPO_SETTINGS)) as made:
        fill(made, 60, every=20)
        made.sample({"prompt": CHAT, "answer": "Ten euro.<|im_end|>", "reward": 1.0}, 60)
        made.event("warning", "kl.over_target", "KL is above its target.", 40, advice="Raise `kl.start`.")
        made.event("fatal", "reward.gold_falls", "Gold falls.", 55)
        made.finish("done")
    return folder
