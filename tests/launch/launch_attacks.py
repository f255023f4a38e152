"""Values that would be run, or would add something, in a careless file: as names of recipes, folders, settings, flags.

Each is put into an sbatch file, which bash then runs with an srun that only writes down what it is given, and into
manifests, which are read back. It held where everything arrives as it was written and nothing else happens, or where
the command refuses and writes nothing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML

from kedge.commands.launch import Asked, Written, launch_kubernetes, launch_slurm
from kedge.core.errors import ConfigError

RECIPE = """
kedge: 1
name: pair
model: tiny
stages:
  sft: {kind: sft, data: demos.jsonl}
"""
IN_GROUPS = f"{RECIPE}placement: {{groups: {{learner: {{gpus: 4}}}}}}\n"
"""Roles have GPUs of their own."""
PLANTED = "pwned"
VALUES = (
    "plain",
    "a b",
    "it's",
    'a"b',
    "$(touch pwned)",
    "`touch pwned`",
    "x; touch pwned",
    "x && touch pwned",
    "x | touch pwned",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "x\ntouch pwned",
    "x\r\n#SBATCH --uid=0",
    "x\nspec:\n  hostNetwork: true",
    "${IFS}touch${IFS}pwned",
    "$HOME",
    "$(NODE_RANK)",
    "$$(NODE_RANK)",
    "-rf",
    "--no-check",
    "#comment",
    "~",
    "*",
    "a\\",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "a: b",
    "- a",
    "&a *b",
    "!!python/object:os.system",
    "%x %j",
    "\u202eevil",
    "x\x1b[2J",
    "tab\there",
    "ü 猫 🐟",
    ">(touch pwned)",
    "x > pwned",
    "<<EOF",
)
PATHS = ("recipe", "folder", "runs", "set")


@dataclass(frozen=True)
class Case:
    place: str
    value: str
    cluster: str

    @property
    def recipe(self) -> str:
        return IN_GROUPS if self.cluster in ("slurm-ray", "rayjob") else RECIPE

    def __str__(self) -> str:
        return f"{self.cluster}, {self.place}: {self.value!r}"


_SLURM_PLACES = (*PATHS, "python", "image", "account", "partition", "time", "sbatch")
_KUBERNETES_PLACES = (*PATHS, "image", "namespace", "name", "volume", "at")
CASES = (
    *(Case(place, value, "slurm") for place in _SLURM_PLACES for value in VALUES),
    *(Case(place, value, "slurm-ray") for place in ("recipe", "set", "python") for value in VALUES),
    *(Case(place, value, "jobset") for place in _KUBERNETES_PLACES for value in VALUES),
    *(Case("recipe", value, kind) for kind in ("trainjob", "pytorchjob", "rayjob") for value in VALUES),
)

_SRUN = '#!/bin/bash\nprintf "%s\\0" "$@" > "$RECORD"\n'
_KEDGE = '#!/bin/bash\nprintf "%s\\0" kedge "$@" > "$RECORD"\n'
_SCONTROL = "#!/bin/bash\n[[ $1 == show ]] && echo node1\nexit 0\n"
_NOTHING = "#!/bin/bash\nexit 0\n"


def attempt(case: Case) -> str | None:
    """What went wrong; None where it held."""
    with TemporaryDirectory() as folder, _inside(Path(folder)) as home:
        try:
            place = home / case.value if case.place == "folder" else home
            place.mkdir(exist_ok=True)
        except (OSError, ValueError):
            return None  # no disk has such a name
        os.chdir(place)
        asked = _asked(case)
        try:
            asked.recipe.write_text(case.recipe)
        except (OSError, ValueError):
            return None
        try:
            written = _launch(case, asked)
        except ConfigError:
            left = [path.name for path in place.iterdir() if path.name not in (asked.recipe.name, "bin")]
            return f"refused, and yet {left} were written" if left else None
        check = _run_script if case.cluster.startswith("slurm") else _read_manifest
        problem = check(case, asked, written, home)
        is_run = any(path.name.startswith(PLANTED) for path in home.rglob("*"))
        return f"ran what it was given ({problem})" if is_run else problem


@contextmanager
def _inside(home: Path) -> Iterator[Path]:
    before = os.getcwd()
    os.chdir(home)
    try:
        yield home.resolve()
    finally:
        os.chdir(before)


def _asked(case: Case) -> Asked:
    return Asked(
        recipe=Path(f"{case.value}.yaml" if case.place == "recipe" else "r.yaml"),
        overrides=(f"model={case.value!r}",) if case.place == "set" else (),
        nodes=2,
        gpus_per_node=8,
        processes_per_node=None,
        notice_s=120,
        template=None,
        to="job",
        force=False,
        submit=False,
    )


def _flag(case: Case, name: str, default: str | None = None) -> str | None:
    return case.value if case.place == name else default


def _launch(case: Case, asked: Asked) -> Written:
    if case.cluster.startswith("slurm"):
        return launch_slurm(
            asked,
            runs=Path(_flag(case, "runs", "runs") or ""),
            time=_flag(case, "time"),
            account=_flag(case, "account"),
            partition=_flag(case, "partition"),
            options=[f"comment={case.value}"] if case.place == "sbatch" else [],
            python=_flag(case, "python"),
            image=_flag(case, "image"),
        )
    return launch_kubernetes(
        asked,
        kind=case.cluster,
        at=f"/data/{case.value}.yaml" if case.place == "at" else None,
        runs=f"/data/{case.value}" if case.place == "runs" else None,
        image=_flag(case, "image", "kedge:1"),
        namespace=_flag(case, "namespace"),
        name=_flag(case, "name"),
        volumes=["data:/data", f"home:{os.getcwd()}", *([f"x:/{case.value}"] if case.place == "volume" else [])],
    )


def _expected(case: Case, asked: Asked) -> list[str]:
    """What `kedge` must be given."""
    is_here = case.cluster.startswith("slurm")
    recipe, runs = str(asked.recipe), _flag(case, "runs", "runs")
    if is_here and recipe.startswith("-"):
        recipe = f"./{recipe}"
    if not is_here:
        recipe = f"/data/{case.value}.yaml" if case.place == "at" else f"{os.getcwd()}/{recipe}"
        runs = f"/data/{case.value}" if case.place == "runs" else f"{recipe.rpartition('/')[0]}/runs"
    if is_here and case.place == "image":
        runs = f"{os.getcwd()}/runs"
    sets = [part for override in asked.overrides for part in ("--set", override)]
    # Path writes a folder in its shortest way.
    return ["run", recipe, f"--runs={Path(runs or '') if is_here else runs}", *sets, "--resume-if-begun"]


def _run_script(case: Case, asked: Asked, written: Written, home: Path) -> str | None:
    programs, record = home / "bin", home / "record"
    programs.mkdir()
    is_ray = case.cluster == "slurm-ray"
    starter = case.value if case.place == "python" else "kedge"
    idle = dict.fromkeys(("ray", "python"), _NOTHING)
    tools = {"srun": _NOTHING if is_ray else _SRUN, "scontrol": _SCONTROL, "kedge": _KEDGE, **idle}
    for name, text in tools.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "RECORD": str(record),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_ID": "7",
    }
    # In another folder: the script finds its own by itself.
    script = str(Path.cwd() / written.file) if written.file else ""
    ran = subprocess.run(["bash", script], env=environment, cwd=programs, capture_output=True, text=True, check=False)
    if is_ray and case.place == "python":
        return None  # there is no such program, and that is all
    if ran.returncode or ran.stderr:
        return f"exit {ran.returncode}: {ran.stderr}"
    given = record.read_text().split("\0")[:-1]
    start = [starter, "-m", "kedge.cli"] if case.place == "python" else ["kedge"]
    wanted = [*start, *_expected(case, asked)]
    return None if given[-len(wanted) :] == wanted else f"srun was given {given}, and not {wanted}"


def _read_manifest(case: Case, asked: Asked, written: Written, home: Path) -> str | None:
    documents = list(YAML(typ="safe", pure=True).load_all(written.text))
    if len(documents) != 1:
        return f"{len(documents)} objects, not one"
    found, wanted = _keys(documents[0]), _plain_keys(case.cluster)
    if case.place in ("namespace", "volume"):
        wanted = found if set(found) - set(wanted) <= _ADDED else wanted
    if found != wanted:
        return f"other keys than a plain value gives: {sorted(set(found) ^ set(wanted))}"
    folder = _container(documents[0]).get("workingDir")
    if folder not in (None, str(Path(f"/data/{case.value}").parent if case.place == "at" else Path.cwd())):
        return f"the container starts in {folder!r}"
    words = _arguments(documents[0])
    return None if words == _expected(case, asked) else f"the container is given {words}"


@cache
def _plain_keys(kind: str) -> list[str]:
    """The keys of a manifest whose values are plain."""
    case = Case("none", "", kind)
    with TemporaryDirectory() as folder, _inside(Path(folder)):
        Path("r.yaml").write_text(case.recipe)
        (document,) = YAML(typ="safe", pure=True).load_all(_launch(case, _asked(case)).text)
    return _keys(document)


_ADDED = {"namespace", "name", "mountPath", "persistentVolumeClaim", "claimName"}


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [key for name, part in value.items() for key in (name, *_keys(part))]
    return [key for part in value for key in _keys(part)] if isinstance(value, list) else []


def _container(document: Any) -> dict[str, Any]:
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        return spec["trainer"]
    if document["kind"] == "RayJob":
        return spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    if document["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def _arguments(document: Any) -> list[str]:
    """What `kedge` is given once Kubernetes has looked for $(NAME)."""
    if document["kind"] == "RayJob":
        return document["spec"]["entrypoint"].split(" ")[1:]  # nothing in it is quoted: refused before
    command = _container(document)["command"]
    return [expanded(word) for word in command[command.index("kedge.cli") + 1 :]]


def expanded(word: str, known: dict[str, str] | None = None) -> str:
    """A word of a command as Kubernetes expands it: $$ is $, $(NAME) the variable if there is one."""
    text, at = "", 0
    names = {"NODE_RANK": "5", **(known or {})}
    while at < len(word):
        if word.startswith("$$", at):
            text, at = text + "$", at + 2
        elif word.startswith("$(", at) and (end := word.find(")", at)) > 0:
            name = word[at + 2 : end]
            text, at = text + names.get(name, f"$({name})"), end + 1
        else:
            text, at = text + word[at], at + 1
    return text
