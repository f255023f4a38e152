"""Templates become files. A value that a template prints comes out quoted for the file it stands in, always.

In a shell script that is a word of the shell, in a manifest a string of YAML: whatever a path or a setting holds, it
is text there and nothing is run. Left out: what goes into a file (settings), and whether it may (checks).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined
from jinja2.sandbox import SandboxedEnvironment

from kedge import __version__
from kedge.core.errors import ConfigError
from kedge.launch.settings import RAY_PORT, Kind, KubernetesJob, SlurmJob

_SUFFIX: Final[Mapping[Kind, str]] = {
    "slurm": "sh",
    "slurm-ray": "sh",
    "jobset": "yaml",
    "trainjob": "yaml",
    "pytorchjob": "yaml",
    "rayjob": "yaml",
}


def shipped_template(kind: Kind) -> str:
    """The text of the template that comes with Kedge."""
    return (files("kedge.launch") / "templates" / f"{kind}.{_SUFFIX[kind]}.j2").read_text("utf-8")


def render(job: SlurmJob | KubernetesJob, template: Path | None = None) -> str:
    """The file of a job, by the shipped template of its kind or by one of the user's."""
    kind = job.kind
    source = shipped_template(kind) if template is None else _read(template)
    quote = _as_word if _SUFFIX[kind] == "sh" else _as_yaml
    environment = SandboxedEnvironment(
        undefined=StrictUndefined,
        finalize=quote,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    label = str(template) if template else f"template {kind}"
    try:
        return environment.from_string(source).render(_values(job))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{label}: line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, ArithmeticError) as error:
        known = ", ".join(sorted(_values(job)))
        raise ConfigError(f"{label}: {error}; a template of this kind may use {known}") from error


def _read(template: Path) -> str:
    try:
        return template.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{template}: a template is text in UTF-8, and this file is not") from None
    except OSError as error:
        raise ConfigError(f"{template}: cannot be read as a template: {error.strerror}") from error


def _values(job: SlurmJob | KubernetesJob) -> dict[str, Any]:
    """Everything that a template may print."""
    run = job.job
    shared = {
        "version": __version__,
        "name": run.name,
        "nodes": run.nodes,
        "gpus_per_node": run.gpus_per_node,
        "processes_per_node": run.processes_per_node,
        "restarts": run.restarts,
        "notice_s": run.notice_s,
        "folder": job.folder,
        "image": job.image,
        "runs": run.runs,
    }
    if isinstance(job, SlurmJob):
        return shared | {
            "command": job.command,
            "python": job.python or "python",
            "time": job.time,
            "account": job.account,
            "partition": job.partition,
            "options": job.options,
        }
    return shared | {
        "object_name": job.object_name,
        "namespace": job.namespace,
        "volumes": [(f"volume-{number}", volume.claim, volume.path) for number, volume in enumerate(job.volumes)],
        "torchrun": [_unexpanded(word) for word in job.torchrun],
        "module": [_unexpanded(word) for word in job.module],
        "entrypoint": shlex.join(["kedge", *run.arguments]),
        "ray_port": RAY_PORT,
    }


def _as_word(value: Any) -> str:
    """A value as one word of the shell, a list as several.

    >>> _as_word("a b"), _as_word(["run", "$(rm x)"]), _as_word(8)
    ("'a b'", "run '$(rm x)'", '8')
    """
    return _quoted(value, shlex.quote, lambda words: shlex.join(words))


def _as_yaml(value: Any) -> str:
    """A value as YAML on one line: JSON, which is YAML.

    >>> _as_yaml('a: "b"'), _as_yaml(["x", "y"]), _as_yaml(8)
    ('"a: \\\\"b\\\\""', '["x", "y"]', '8')
    """
    return _quoted(value, _json, _json)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(value: Any, of_text: Callable[[str], str], of_list: Callable[[list[str]], str]) -> str:
    if isinstance(value, Undefined):
        return str(value)  # raises, with its name
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Sequence):
        words = list(cast("Sequence[Any]", value))
        if all(isinstance(word, str) for word in words):
            return of_list(words)
    raise TypeError(f"{value!r} is no text, number or list of texts, and a template cannot print it")


def _unexpanded(word: str) -> str:
    """A word of a container's command that Kubernetes leaves as it is: `$(NAME)` stands for a variable there.

    >>> _unexpanded("$(HOSTNAME).yaml")
    '$$(HOSTNAME).yaml'
    """
    return word.replace("$", "$$")
