"""`/data` and `/upload`: files of data into the project, and the audit of what is in them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from kedge.core.errors import DataError
from kedge.core.files import explain, free_bytes, readable_bytes
from kedge.core.findings import Finding
from kedge.web.studio.context import Studio
from kedge.web.studio.guard import UPLOAD
from kedge.web.studio.pages import fragment, page
from kedge.web.studio.project import upload_name
from kedge.web.studio.services import FileReport

FOLDER = "data"


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    file: Annotated[str, StringConstraints(max_length=4096)]


def add_uploads(app: FastAPI, studio: Studio) -> None:
    @app.get("/data")
    def data_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        return page(request, "data.html.j2", "data", files=studio.project.data_files())

    @app.post("/data/audit")
    def audit(body: Asked) -> Response:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({"html": audit_html(studio, body.file)})

    @app.post(UPLOAD)
    async def upload(request: Request, name: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        target = target_of(studio, name)
        await receive(request, target, studio.upload_limit)
        return JSONResponse({"file": studio.project.relative(target)})


def target_of(studio: Studio, name: str) -> Path:
    """Where an uploaded file goes: into the folder of data, under its own name, over nothing."""
    target = studio.project.inside(f"{FOLDER}/{upload_name(name)}")
    if os.path.lexists(target):
        raise DataError(f"{FOLDER}/{name} is there already, and nothing is overwritten; rename the file")
    return target


async def receive(request: Request, target: Path, limit: int) -> None:
    """A body into a file, which is there as a whole or not at all."""
    size = request.headers.get("content-length", "")
    if size.isdigit() and int(size) > limit:
        raise _too_large(limit)
    target.parent.mkdir(parents=True, exist_ok=True)
    if size.isdigit() and int(size) > free_bytes(target.parent):
        raise DataError(f"the disk has {readable_bytes(free_bytes(target.parent))} free, too little for this file")
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    received = 0
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb") as file:
            async for chunk in request.stream():
                received += len(chunk)
                if received > limit:
                    raise _too_large(limit)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if not received:
            raise DataError("the file is empty; nothing was kept")
        os.link(beside, target)  # unlike a rename, never over a file that came meanwhile
    except FileExistsError as error:
        raise DataError(f"{FOLDER}/{target.name} is there already, and nothing is overwritten") from error
    except OSError as error:
        raise DataError(f"the file cannot be kept: {explain(error, target)}") from error
    finally:
        beside.unlink(missing_ok=True)


def _too_large(limit: int) -> DataError:
    return DataError(
        f"larger than {readable_bytes(limit)}, the most that is taken here; copy the file into the project's folder "
        "instead, or start `kedge studio --upload-limit GIB`"
    )


def audit_html(studio: Studio, file: str) -> str:
    """The audit of a file of the project; one that cannot be read says why."""
    path = studio.project.inside(file)
    if not path.is_file():
        raise DataError(f"{file}: there is no such file in the project")
    try:
        report = studio.services.audit(path)
    except DataError as error:
        words = str(error).replace(f"{studio.project.folder}{os.sep}", "")
        finding = Finding(level="fatal", code="data.unreadable", message=words)
        report = FileReport(file=file, kind="", rows=0, findings=(finding,))
    return fragment("audit.html.j2", report=report)
