"""An exported folder to a model hub. The token comes from HF_TOKEN, and is shown nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kedge.core.errors import ConfigError, RunError

TOKEN_VARIABLE = "HF_TOKEN"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
T = TypeVar("T")


class Hub:
    """A repository of a model hub that may be written to: `$HF_ENDPOINT`, or huggingface.co."""

    def __init__(self, repo: str, *, is_public: bool) -> None:
        if not _REPO.fullmatch(repo):
            raise ConfigError(f"--push {repo}: expected organisation/name, as the hub names models")
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not self._token:
            raise ConfigError(
                f"--push {repo}: no token in {TOKEN_VARIABLE}; make one with the right to write on the hub, and set "
                f"{TOKEN_VARIABLE} in the environment"
            )
        from huggingface_hub import HfApi

        self.repo, self._is_public = repo, is_public
        self._api: Any = HfApi(token=self._token)

    def check(self) -> None:
        """Raise where the token is not taken, or where a push that was meant to be private would be public."""
        self._ask("asked who the token belongs to", self._api.whoami)
        if not self._ask("asked for the repository", lambda: self._api.repo_exists(self.repo)):
            return
        is_private = self._ask("asked for the repository", lambda: self._api.repo_info(self.repo).private)
        if not is_private and not self._is_public:
            raise ConfigError(
                f"--push {self.repo}: this repository is there, and public; give --public where everybody may see the "
                "model, or push to another one"
            )

    def upload(self, folder: Path, *, message: str) -> str:
        """Everything in `folder` as one commit; the repository is made where it is not there. Returns its address."""
        self._ask(
            "asked for the repository",
            lambda: self._api.create_repo(self.repo, private=not self._is_public, exist_ok=True),
        )
        self._ask(
            "sent the files",
            lambda: self._api.upload_folder(repo_id=self.repo, folder_path=str(folder), commit_message=message),
        )
        return f"{self._api.endpoint}/{self.repo}"

    def _ask(self, doing: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # the client raises errors of several libraries, with the request in their text
            reason = " ".join(str(error).split()).replace(self._token, "…") or type(error).__name__
            raise RunError(
                f"--push {self.repo}: the hub at {self._api.endpoint} refused when it was {doing}: {reason[:300]}"
            ) from None
