"""`/new` and `/recipe`: a recipe from a template, its form and its YAML side by side, what is wrong at each field."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from kedge.core import plugins
from kedge.core.errors import ConfigError, DataError, KedgeError
from kedge.core.files import hash_file, hash_json
from kedge.core.quoting import quoted
from kedge.core.yaml.editing import tree_of_text, with_value
from kedge.core.yaml.source import KeyPath
from kedge.recipe.schema import Recipe
from kedge.recipe.templates import template_files
from kedge.web.studio import drafts
from kedge.web.studio.checking import PlacedReport, placed
from kedge.web.studio.context import Studio
from kedge.web.studio.drafts import Change, Draft, Operation, Outdated, key_of
from kedge.web.studio.fields import Field, Form
from kedge.web.studio.pages import fragment, page
from kedge.web.studio.project import Project

Short = Annotated[str, StringConstraints(max_length=4096)]


class NewRecipe(BaseModel):
    model_config = ConfigDict(extra="forbid")
    template: Short
    name: Short
    model: Short = ""


class Edit(BaseModel):
    """A change by the form of the recipe with the hash `base`; `shape` is the form that the page shows."""

    model_config = ConfigDict(extra="forbid")
    file: Short
    base: Short
    shape: Short = ""
    operation: Operation
    path: list[str | int]
    text: str = ""


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    file: Short
    base: Short
    shape: Short = ""
    text: str


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")
    file: Short
    base: Short


def add_new(app: FastAPI, studio: Studio) -> None:
    project, services = studio.project, studio.services

    @app.get("/new")
    def new_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]  # fastapi calls it
        models = [*services.models(), *((name, "in this project") for name in project.model_folders())]
        return page(request, "new.html.j2", "new", templates=services.templates(), models=models)

    @app.post("/new")
    def new(body: NewRecipe) -> Response:  # pyright: ignore[reportUnusedFunction]
        problems = _new_problems(studio, body)
        if problems:
            return JSONResponse({"problems": problems})
        file = make_recipe(studio, body)
        return JSONResponse({"go": f"/recipe?file={file.name}"})


def add_editor(app: FastAPI, studio: Studio) -> None:
    project = studio.project

    @app.get("/recipe")
    def recipe_page(request: Request, file: str = "") -> Response:  # pyright: ignore[reportUnusedFunction]
        draft = drafts.read_draft(project, file)
        form, _, problems = drafts.look_at(project, draft)
        return page(
            request,
            "recipe.html.j2",
            "recipe",
            draft=draft,
            form=form,
            form_html=_form_html(studio, form),
            shape=shape_of(form),
            problems=problems,
            kinds=plugins.names("stages"),
        )

    @app.post("/recipe/change")
    def change(body: Edit) -> Response:  # pyright: ignore[reportUnusedFunction]
        draft = drafts.read_draft(project, body.file)
        path = tuple(body.path)
        try:
            text = drafts.changed(
                draft.text, Change(operation=body.operation, path=path, text=body.text.replace("\r", ""))
            )
        except KedgeError as error:
            if draft.hash != body.base:
                raise Outdated(str(error)) from error
            return JSONResponse(_refused(draft, path, str(error)))
        return JSONResponse(_reply(studio, drafts.save_text(draft, text, base=body.base), body.shape))

    @app.post("/recipe/text")
    def text(body: Text) -> Response:  # pyright: ignore[reportUnusedFunction]
        draft = drafts.read_draft(project, body.file)
        saved = drafts.save_text(draft, body.text.replace("\r\n", "\n"), base=body.base)
        return JSONResponse(_reply(studio, saved, body.shape))

    @app.post("/recipe/check")
    def check(body: Asked) -> Response:  # pyright: ignore[reportUnusedFunction]
        draft = drafts.read_draft(project, body.file)
        if draft.hash != body.base:
            raise Outdated(f"{draft.file.name} was changed meanwhile; it is checked again")
        _, report, html = checked(studio, draft, asks_servers=False)
        return JSONResponse(
            {
                "hash": draft.hash,
                "is_fit": not report.fatal,
                "problems": report.fatal.by_key(),
                "top": report.fatal.top,
                "warnings": report.warnings.by_key(),
                "plan": html,
            }
        )


def _new_problems(studio: Studio, body: NewRecipe) -> dict[str, str]:
    """What is wrong with a new run, by the field of the page."""
    problems: dict[str, str] = {}
    if body.template not in studio.services.templates():
        problems["template"] = "choose what to start from"
    try:
        file = drafts.recipe_file(studio.project, f"{body.name}.yaml")
        if os.path.lexists(file):
            problems["name"] = f"there is a recipe {file.name} already; open it, or choose another name"
        elif (studio.project.runs / body.name).exists():
            problems["name"] = f"there is a run {body.name} already; choose another name"
    except DataError:
        problems["name"] = f"letters, digits, - and _, at most 100, found {quoted(body.name)}"
    model = body.model.strip()
    aliases = [alias for alias, _ in studio.services.models()]
    if model and model not in aliases and (problem := studio.project.escape_of(model)):
        problems["model"] = problem
    elif model and model not in aliases and "/" not in model and not (studio.project.folder / model).is_dir():
        problems["model"] = f"{quoted(model)} is no built-in model, no folder of the project, and no hub id OWNER/NAME"
    return problems


def make_recipe(studio: Studio, body: NewRecipe) -> Path:
    """The recipe and the shipped files of a template in the project; files of the project stay as they are."""
    project = studio.project
    (source, _), *others = template_files(body.template)
    targets = {place.as_posix(): _free_place(project, origin, place, body.template) for origin, place in others}
    text = with_value(source.read_text(encoding="utf-8"), ("name",), body.name)
    if body.model.strip():
        text = with_value(text, ("model",), body.model.strip())
    text = _with_files(
        text, {name: new for name, target in targets.items() if (new := project.relative(target)) != name}
    )
    for origin, place in others:
        target = targets[place.as_posix()]
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(origin.read_bytes())
    file = drafts.recipe_file(project, f"{body.name}.yaml")
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file.name}: it is there already; choose another name") from error
    return file


def _free_place(project: Project, origin: Path, place: Path, template: str) -> Path:
    """Where a shipped file goes; beside a file of the same name it is called after its template."""
    for name in (place, place.with_name(f"{template}-{place.name}")):
        target = project.inside(name.as_posix())
        if not os.path.lexists(target) or (target.is_file() and hash_file(target) == hash_file(origin)):
            return target
    raise ConfigError(f"{place} and {name.name}: other files of these names are there already; rename one first")


def _with_files(text: str, names: Mapping[str, str]) -> str:
    """The recipe with other names of files, also of those whose function or split stands behind a colon."""
    for path, value in _texts(tree_of_text(text, Path("recipe.yaml")).values, ()):
        file, colon, part = value.partition(":")
        if file in names:
            text = with_value(text, path, f"{names[file]}{colon}{part}")
    return text


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every text of a recipe, with its place."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list):
        held = cast("Mapping[str, Any] | list[Any]", value)
        for key, part in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from _texts(part, (*path, key))


def checked(studio: Studio, draft: Draft, *, asks_servers: bool) -> tuple[Recipe | None, PlacedReport, str]:
    """All that can be said of a recipe before it runs: at its fields, and the plan as the panel shows it."""
    form, recipe, problems = drafts.look_at(studio.project, draft)
    if recipe is None or form is None:
        return None, PlacedReport(fatal=problems), ""
    report = studio.services.check(draft.file, asks_servers)
    result = placed(report, form)
    plan = studio.services.plan(recipe, report)
    return recipe, result, fragment("plan.html.j2", plan=plan, is_fit=not result.fatal, report=report)


def _reply(studio: Studio, draft: Draft, shape: str) -> dict[str, Any]:
    """What a page needs after a change; the form itself only where it has other fields than the page shows."""
    form, _, problems = drafts.look_at(studio.project, draft)
    reply: dict[str, Any] = {
        "hash": draft.hash,
        "text": draft.text,
        "problems": problems.by_key(),
        "top": problems.top,
        "is_readable": form is not None,
    }
    if form is not None:
        values = {key_of(part.path): part.value for part in form.fields()}
        reply |= {"shape": shape_of(form), "values": values}
        if shape_of(form) != shape:
            reply["html"] = _form_html(studio, form)
    return reply


def _refused(draft: Draft, path: tuple[str | int, ...], why: str) -> dict[str, Any]:
    """What was typed cannot be a value: the recipe stays as it is, and the field says why."""
    return {"hash": draft.hash, "refused": {key_of(path): [why]}}


def shape_of(form: Form | None) -> str:
    """The same for forms with the same fields, whatever these hold."""
    if form is None:
        return ""
    parts: list[Any] = []
    for part in form.parts():
        switches: Mapping[str, Any] = {} if isinstance(part, Field) else {"kind": part.kind, "off": part.is_off}
        parts.append([key_of(part.path), dict(switches)])
    return hash_json(parts)


def _form_html(studio: Studio, form: Form | None) -> str:
    if form is None:
        return ""
    aliases = [alias for alias, _ in studio.services.models()]
    lists = drafts.suggestions(studio.project, form, aliases)
    return fragment("form.html.j2", form=form, lists=lists)
