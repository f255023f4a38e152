"""What every stage (`kedge.core.stage.Stage`) promises to recipes, as tests that a plugin subclasses.

    class TestMyStage(StageContract):
        stage = STAGE
        values = {"kind": "my_stage", "data": "pairs.jsonl"}

Left out: the run itself, which needs models and data. Run a small recipe for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from kedge.core.findings import Finding
from kedge.core.settings import Section
from kedge.core.stage import ArtifactKind, Input, Stage


class StageContract:
    """The tests. A subclass gives the stage, and the least that a recipe must say of it."""

    stage: ClassVar[Stage]
    values: ClassVar[Mapping[str, Any]]

    def test_settings_are_named_by_their_kind(self) -> None:
        kind = self.stage.settings.model_fields.get("kind")
        assert kind is not None, "the settings need a field `kind`"
        assert get_args(kind.annotation) == (self.values["kind"],), (
            f"`kind` must be Literal[{self.values['kind']!r}], as the entry point is called, found {kind.annotation}"
        )

    def test_unknown_settings_are_refused(self) -> None:
        extra = self.stage.settings.model_config.get("extra")
        assert extra == "forbid", "a misspelt setting would be taken; settings must be a kedge.core.settings.Section"

    def test_settings_are_read_again_from_a_manifest(self) -> None:
        """A resumed run compares what was written with what the recipe says now."""
        settings = self._settings()
        written = settings.model_dump(mode="json", by_alias=True)
        again = self.stage.settings.model_validate(written)
        assert again == settings, "settings that were written and read again are others"
        assert again.model_dump(mode="json", by_alias=True) == written, "settings change each time they are written"

    def test_every_setting_is_documented(self) -> None:
        """The schema for editors shows the docstring below a field; a bare name says too little."""
        fields = self.stage.settings.model_fields
        bare = [name for name, info in fields.items() if name != "kind" and not info.description]
        assert not bare, f"no docstring below: {', '.join(bare)}"

    def test_inputs_and_outputs_are_of_known_kinds(self) -> None:
        known = set(get_args(ArtifactKind))
        assert self.stage.makes, "a stage makes one output or more"
        outputs = {kind for kind in self.stage.makes.values() if kind not in known}
        assert not outputs, f"makes: {', '.join(outputs)} is no kind of output; kinds: {', '.join(sorted(known))}"
        for name, info in self.stage.settings.model_fields.items():
            marks = [mark for mark in info.metadata if isinstance(mark, Input)]
            inputs = {kind for mark in marks for kind in mark.kinds} - known
            assert not inputs, f"{name}: {', '.join(inputs)} is no kind of input; kinds: {', '.join(sorted(known))}"

    def test_it_is_explained_in_lines(self) -> None:
        assert self.stage.summary.strip(), "`kedge run` prints the summary when the stage begins"
        lines = list(self.stage.explain(self._settings()))
        assert lines, "explain says in plain words what the settings amount to"
        assert all(line and "\n" not in line for line in lines), f"explain gives single lines, found {lines}"

    def test_findings_name_settings_that_exist(self) -> None:
        settings = self._settings()
        findings = list(self.stage.check(settings))
        assert all(isinstance(finding, Finding) for finding in findings), f"check yields findings, found {findings}"
        paths = set(_paths(settings.model_dump(mode="json", by_alias=True)))
        lost = {finding.where for finding in findings if finding.where} - paths
        assert not lost, f"findings are about {', '.join(lost)}, which is no setting"

    def test_the_window_is_a_number_of_tokens(self) -> None:
        window = self.stage.window(self._settings())
        assert window is None or window > 0, f"window is the most tokens of an example, found {window}"

    def test_its_function_takes_a_context_and_the_settings(self) -> None:
        run = self.stage.load_run()
        assert run is not None, "a stage without `run` can be checked only"
        parameters = inspect.signature(run).parameters
        assert len(parameters) == 2, f"run(context, settings) is called with two arguments, found {list(parameters)}"

    def _settings(self) -> Section:
        return self.stage.settings.model_validate(dict(self.values))


def _paths(values: Any, path: str = "") -> list[str]:
    """The dotted names of all settings, sections included.

    >>> _paths({"kl": {"start": 0.1}, "seed": 1})
    ['kl', 'kl.start', 'seed']
    """
    if not isinstance(values, dict):
        return [path]
    inner = [found for key, value in values.items() for found in _paths(value, f"{path}.{key}" if path else str(key))]
    return [path, *inner] if path else inner
