"""What cannot be launched is refused before a file is written: contradictions, paths that nobody shares, odd values.

Values that stand in a file as text are quoted there (render). Those that a scheduler reads by rules of its own (options
of sbatch, names of objects, the entry point of a Ray job) are held to letters that mean nothing to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from kedge.core.errors import ConfigError
from kedge.core.quoting import quoted
from kedge.core.suggest import did_you_mean
from kedge.launch.sbatch import BARE, CONTRADICTING, KNOWN, OWN
from kedge.launch.settings import Job, Volume

MOST_PROCESSES: Final = 1024
LONGEST_OBJECT_NAME: Final = 40
"""JobSet's pods are called NAME-node-0-0, Ray's get some 20 letters more; 63 is what a name may have."""
SHARED_MEMORY: Final = "/dev/shm"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./=,:@%+-]+")
"""What two shells in a row leave as it is."""
_SHELL: Final = re.compile(r"""[$`\\"'<>|&;(){}*?!#~\[\]]""")
_TIME: Final = re.compile(r"(?:(?P<days>\d{1,3})-)?(?P<first>\d{1,5})(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}))?")
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@#+-]*")


def refuse_hidden(values: Mapping[str, str | None]) -> None:
    """An error where a value, by the name of its flag, has line breaks or other characters that cannot be seen."""
    for name, value in values.items():
        if value is not None and not value.isprintable():
            raise ConfigError(
                f"{name}: line breaks and characters that cannot be seen are refused, found {quoted(value)}"
            )


def refuse_shell(values: Mapping[str, str | None], template: str) -> None:
    """An error where a value could be more than text in a template of the user's, which may quote it wrongly."""
    for name, value in values.items():
        if value is not None and (sign := _SHELL.search(value)):
            raise ConfigError(
                f"{name}: {sign[0]!r} has a meaning to shells, and {template} is not ours; rename {quoted(value)}, or "
                "use "
                "the template that comes with Kedge"
            )


def processes_per_node(
    asked: int | None, *, nodes: int, gpus_per_node: int, num_sampling: int, has_groups: bool, device: str
) -> int:
    """How many processes a machine gets; an error where that contradicts its GPUs.

    >>> processes_per_node(None, nodes=1, gpus_per_node=8, num_sampling=2, has_groups=False, device="auto")
    6
    """
    if device == "cpu" and gpus_per_node:
        instead = "" if has_groups else " with --processes-per-node"
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node}: the recipe says device: cpu; use --gpus-per-node 0{instead}, or another "
            "device"
        )
    if has_groups:
        if asked is not None:
            raise ConfigError("--processes-per-node: placement.groups says how many processes there are; leave it out")
        return 1
    if not gpus_per_node:
        if asked is None:
            raise ConfigError(
                "--gpus-per-node 0: without GPUs, --processes-per-node says how many processes a machine gets"
            )
        return asked
    if num_sampling and nodes > 1:
        raise ConfigError(
            f"generator.gpus is {num_sampling}: Kedge starts vLLM on the machine of process 0 alone, so on "
            f"{nodes} machines "
            "GPUs would stay idle; start servers yourself (generator.servers), or use --nodes 1"
        )
    learning = gpus_per_node - num_sampling
    if learning < 1:
        raise ConfigError(
            f"--gpus-per-node {gpus_per_node}: generator.gpus gives {num_sampling} to vLLM, and none is left to learn"
        )
    if asked is not None and asked > learning:
        samplers = f", of which vLLM has {num_sampling}" if num_sampling else ""
        raise ConfigError(
            f"--processes-per-node {asked}: each needs a GPU, and a machine has {gpus_per_node}{samplers}; at "
            f"most {learning}"
        )
    return asked or learning


def refuse_contradictions(job: Job, processes: int | str) -> None:
    """An error where the recipe's `placement.processes` is not what the job starts."""
    total = job.nodes * job.processes_per_node
    if total > MOST_PROCESSES:
        raise ConfigError(f"{job.nodes} × {job.processes_per_node} = {total:,} processes; at most {MOST_PROCESSES:,}")
    if not job.has_groups and processes not in ("auto", 1, total):
        raise ConfigError(
            f"placement.processes is {processes}, and {job.nodes} node(s) × {job.processes_per_node} make "
            f"{total}; leave it "
            f"out, or start {processes}"
        )


def refuse_large_groups(num_gpus: int, *, nodes: int, gpus_per_node: int) -> None:
    """An error where the groups of a recipe want more GPUs than the job has."""
    if num_gpus > nodes * gpus_per_node:
        raise ConfigError(
            f"placement.groups: {num_gpus} GPUs in all, and {nodes} node(s) × {gpus_per_node} have "
            f"{nodes * gpus_per_node}"
        )


def checked_time(text: str, notice_s: int) -> str:
    """A time limit as Slurm reads it, with room for the notice.

    >>> checked_time("1-12", 120)
    '1-12'
    """
    seconds = _seconds(text)
    if seconds is None:
        raise ConfigError(f"--time: minutes, HH:MM:SS, D-HH or D-HH:MM:SS, found {quoted(text)}")
    if seconds < 2 * notice_s:
        raise ConfigError(
            f"--time {text} is {seconds:,} seconds, and {notice_s} before its end the run is told to stop: "
            "nothing would "
            f"be learnt; allow at least {2 * notice_s:,} seconds"
        )
    return text


def _seconds(text: str) -> int | None:
    """
    >>> [_seconds(text) for text in ("90", "1:30", "01:00:00", "2-0", "1-2:3", "1-2:3:4", "-1", "1:2:3:4")]
    [5400, 90, 3600, 172800, 93780, 93784, None, None]
    """
    if (match := _TIME.fullmatch(text)) is None:
        return None
    parts = [int(part) for part in match.group("first", "second", "third") if part is not None]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(match["days"]) * 86_400 + hours * 3600 + minutes * 60 + seconds
    scales = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
    return sum(part * scale for part, scale in zip(parts, scales, strict=True))


def checked_option(flag: str, value: str) -> str:
    """A value that sbatch reads from a comment of the script: no blanks, no quotes, nothing for a shell."""
    if not value or not re.fullmatch(r"[A-Za-z0-9_.,@+=:/*&|()\[\]%-]+", value):
        raise ConfigError(f"{flag}: letters, digits and . , : / = + - _ @ % & | * ( ) [ ] alone, found {quoted(value)}")
    return value


def checked_options(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """More options of sbatch, as `NAME=VALUE` or `NAME`; an error where sbatch has none of the name.

    >>> checked_options(["constraint=h100", "exclusive"])
    (('constraint', 'h100'), ('exclusive', ''))
    """
    options: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        name = name.removeprefix("--")
        _refuse_option(name, value)
        if name in options:
            raise ConfigError(f"--sbatch {name}: given twice, and sbatch would take the last one; give it once")
        if not sign and name not in BARE:
            raise ConfigError(f"--sbatch {name}: this option of sbatch needs a value: --sbatch {name}=VALUE")
        options[name] = checked_option(f"--sbatch {name}", value) if sign else ""
    return tuple(options.items())


def _refuse_option(name: str, value: str) -> None:
    """An error where sbatch has no such option, or the file says the same by another one."""
    if name in OWN:
        raise ConfigError(f"--sbatch {name}: Kedge writes this option itself{_flag_for(name)}")
    if name not in KNOWN:
        raise ConfigError(f"--sbatch: sbatch has no option {quoted(name)}{did_you_mean(name, sorted(KNOWN))}")
    is_gpu = name == "gres" and any(part.partition(":")[0] == "gpu" for part in value.split(","))
    if reason := CONTRADICTING.get("gpus" if is_gpu else name):
        raise ConfigError(f"--sbatch {name}: {reason}")


def _flag_for(name: str) -> str:
    flags = {"time", "account", "partition", "nodes", "gpus-per-node"}
    return f"; use --{name}" if name in flags else "; edit the file where you need another one"


def object_name(name: str, given: str | None = None) -> str:
    """What a cluster may call the job: the run's name in small letters, with - for _.

    >>> object_name("HH_small-2"), object_name("7b")
    ('hh-small-2', 'kedge-7b')
    """
    if given is not None:
        if not _LABEL.fullmatch(given) or not given[0].isalpha() or len(given) > LONGEST_OBJECT_NAME:
            raise ConfigError(
                f"--name: a small letter, then small letters, digits and -, at most {LONGEST_OBJECT_NAME}, found "
                f"{quoted(given)}"
            )
        return given
    made = name.lower().replace("_", "-").strip("-")
    made = made if made[0].isalpha() else f"kedge-{made}"
    if len(made) > LONGEST_OBJECT_NAME:
        raise ConfigError(
            f"{name}: a job on Kubernetes may have {LONGEST_OBJECT_NAME} letters, and this has {len(made)}; give it a "
            "shorter one with --name"
        )
    return made


def checked_image(image: str | None) -> str:
    if image is None:
        raise ConfigError("--image: the pods need a container image with Kedge; containers/Dockerfile makes one")
    if not _IMAGE.fullmatch(image):
        raise ConfigError(f"--image: REGISTRY/NAME:TAG, found {quoted(image)}")
    return image


def checked_namespace(namespace: str | None) -> str | None:
    if namespace is not None and (not _LABEL.fullmatch(namespace) or len(namespace) > 63):
        raise ConfigError(f"--namespace: small letters, digits and -, at most 63, found {quoted(namespace)}")
    return namespace


def checked_volumes(texts: Iterable[str]) -> tuple[Volume, ...]:
    """
    >>> checked_volumes(["data:/mnt/data"])
    (Volume(claim='data', path='/mnt/data'),)
    """
    volumes: list[Volume] = []
    for text in texts:
        claim, sign, given = text.partition(":")
        is_place = given.startswith("/") and ":" not in given and ".." not in PurePosixPath(given).parts
        path = str(PurePosixPath("/", given.lstrip("/")))
        if not sign or not _SUBDOMAIN.fullmatch(claim) or not is_place or path == "/":
            raise ConfigError(
                f"--volume: CLAIM:PATH, the name of a persistent volume claim and an absolute path in the pods, found "
                f"{quoted(text)}"
            )
        if PurePosixPath(SHARED_MEMORY).is_relative_to(path):
            raise ConfigError(
                f"--volume: {quoted(text)} hides {SHARED_MEMORY}, the memory through which processes exchange; use "
                "another path"
            )
        if path in (volume.path for volume in volumes):
            raise ConfigError(f"--volume: two claims on {quoted(path)}; give each a path of its own")
        volumes.append(Volume(claim=claim, path=path))
    return tuple(volumes)


def refuse_unshared(place: str, what: str, volumes: Sequence[Volume], *, flag: str) -> None:
    """An error where a path lies on no volume: pods have disks of their own, which go with them."""
    path = PurePosixPath(place)
    if not path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{flag}: {what} needs an absolute path in the pods, found {quoted(place)}")
    if any(path.is_relative_to(volume.path) for volume in volumes):
        return
    shared = ", ".join(volume.path for volume in volumes) or "none is given"
    raise ConfigError(
        f"{flag}: pods do not share {quoted(place)}, {what}; mount a claim above it (--volume CLAIM:PATH; "
        f"{shared}), or "
        f"name a path on a volume ({flag})"
    )


def refuse_folder(place: str, volumes: Sequence[Volume], *, file: str) -> None:
    """An error where a recipe is said to lie at a volume itself, which is a folder."""
    path = str(PurePosixPath(place))
    if path in (volume.path for volume in volumes):
        raise ConfigError(f"--at: {quoted(place)} is a volume, not the recipe on it; name its file: --at {path}/{file}")


def refuse_two_shells(words: Iterable[str]) -> None:
    """An error where the entry point of a Ray job would not arrive as it was written."""
    for word in words:
        if not _PLAIN.fullmatch(word):
            raise ConfigError(
                f"KubeRay hands the command of a Ray job through two shells, which would not leave {quoted(word)} as "
                "it is; "
                "use names of letters, digits and . / _ - = , : @ % +, and write other settings into the recipe"
            )


def refuse_mounts(*paths: str) -> None:
    """An error where a path cannot be written in pyxis' list of mounts."""
    for path in paths:
        if ":" in path or "," in path:
            raise ConfigError(f"--image: a path with : or , cannot be mounted into a container, found {quoted(path)}")
