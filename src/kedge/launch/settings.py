"""What a job on a cluster is made of: the recipe as its machines see it, how many machines, and who computes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["slurm", "slurm-ray", "jobset", "trainjob", "pytorchjob", "rayjob"]
"""A file that can be written; each has a template."""
KUBERNETES: Final = ("jobset", "trainjob", "pytorchjob", "rayjob")
NOTICE_S: Final = 120
"""How long before its end a job is told: time for the step that is under way and for a checkpoint."""
RAY_PORT: Final = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of a recipe on machines that are alike."""

    name: str
    """The run's, which is its folder below `runs`."""
    recipe: str
    """Its file, as the machines of the job see it."""
    runs: str
    """The folder of all runs, on a disk that they share."""
    overrides: tuple[str, ...] = ()
    """Settings that the recipe is run with, as `A.B=V`."""
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    restarts: int
    """How many times a lost process leads back to the last checkpoint."""
    notice_s: int = NOTICE_S
    has_groups: bool = False
    """Roles have GPUs of their own: Ray places them, and one driver runs the recipe."""

    @property
    def arguments(self) -> list[str]:
        """What follows `kedge`. A job that is started again goes on from the last checkpoint."""
        recipe = f"./{self.recipe}" if self.recipe.startswith("-") else self.recipe
        sets = [part for override in self.overrides for part in ("--set", override)]
        return ["run", recipe, f"--runs={self.runs}", *sets, "--resume-if-begun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    job: Job
    folder: str
    """Where the job runs: paths of the recipe's settings that are relative to a folder start here."""
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    """More options of sbatch, by name."""
    python: str | None = None
    """The interpreter that has Kedge; else the command `kedge` of the shell that submits."""
    image: str | None = None
    """A container image, for clusters whose srun has pyxis."""

    @property
    def kind(self) -> Kind:
        return "slurm-ray" if self.job.has_groups else "slurm"

    @property
    def command(self) -> list[str]:
        start = [self.python, "-m", "kedge.cli"] if self.python else ["kedge"]
        return [*start, *self.job.arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A claim that all pods of a job mount."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    job: Job
    kind: Kind
    object_name: str
    """What the cluster calls the job."""
    image: str
    namespace: str | None = None
    volumes: tuple[Volume, ...] = ()
    folder: str = "/"
    """Where the containers start: the folder of the recipe."""

    @property
    def torchrun(self) -> list[str]:
        """One process a GPU on one machine; where the machines meet, the kind of job says."""
        processes = f"--nproc-per-node={self.job.processes_per_node}"
        return ["torchrun", f"--nnodes={self.job.nodes}", processes]

    @property
    def module(self) -> list[str]:
        """What torchrun runs."""
        return ["-m", "kedge.cli", *self.job.arguments]
