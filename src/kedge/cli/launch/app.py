"""`kedge launch`: a recipe on Slurm or Kubernetes, by a file that you may edit."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import typer

from kedge.cli.screen import out, writing
from kedge.launch.settings import NOTICE_S

app = typer.Typer(
    name="launch",
    help="Write the file from which a cluster starts a recipe: sbatch for Slurm, a manifest for Kubernetes.",
    no_args_is_help=True,
)
Recipe = Annotated[Path, typer.Argument(help="A recipe (YAML).")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=V", help="Change one setting of the recipe.")]
Nodes = Annotated[int, typer.Option(min=1, max=1024, help="Machines.")]
Gpus = Annotated[int, typer.Option(min=0, max=64, help="GPUs of a machine.")]
Processes = Annotated[int | None, typer.Option(min=1, max=64, help="Processes of a machine; else one a GPU.")]
Notice = Annotated[int, typer.Option(min=10, max=3600, help="Seconds to save in, before a job is ended.")]
Template = Annotated[Path | None, typer.Option(help="A template of your own (kedge launch template writes ours).")]
To = Annotated[str | None, typer.Option("--to", help="The file to write; - for the screen. Else named by the run.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]
Submit = Annotated[bool, typer.Option("--submit", help="Hand the file to the scheduler, too.")]
KubernetesKind = Literal["jobset", "trainjob", "pytorchjob", "rayjob"]


@app.command()
def slurm(
    recipe: Recipe,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 8,
    processes_per_node: Processes = None,
    time: Annotated[str | None, typer.Option(help="Time limit: minutes, HH:MM:SS or D-HH:MM:SS.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="NAME=VALUE", help="Another option of sbatch: qos=high.")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of all runs, on a disk that all machines see.")] = (
        Path("runs")
    ),
    python: Annotated[str | None, typer.Option(help="The interpreter that has Kedge; else the command kedge.")] = None,
    image: Annotated[str | None, typer.Option(help="A container image, where srun has pyxis.")] = None,
    overrides: Sets = None,
    notice: Notice = NOTICE_S,
    template: Template = None,
    to: To = None,
    force: Force = False,
    submit: Submit = False,
) -> None:
    """Write an sbatch file: a process a GPU, saved before the time limit, put back into the queue, resumed."""
    from kedge.commands import launch

    asked = launch.Asked(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        notice_s=notice,
        template=template,
        to=to,
        force=force,
        submit=submit,
    )
    with writing(Path(to or ".")):
        written = launch.launch_slurm(
            asked,
            runs=runs,
            time=time,
            account=account,
            partition=partition,
            options=options or (),
            python=python,
            image=image,
        )
    _tell(written, "sbatch")


@app.command()
def kubernetes(
    recipe: Recipe,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 8,
    processes_per_node: Processes = None,
    kind: Annotated[
        KubernetesKind | None, typer.Option(help="What is made; else a JobSet, or a RayJob for placement.groups.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="The container image; containers/Dockerfile makes one.")] = None,
    volume: Annotated[
        list[str] | None, typer.Option(metavar="CLAIM:PATH", help="A claim that all pods mount at a path.")
    ] = None,
    at: Annotated[str | None, typer.Option(help="Where pods find the recipe; else at the same path as here.")] = None,
    runs: Annotated[
        str | None, typer.Option(help="Folder of all runs in the pods; else runs beside the recipe.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Of the cluster; else kubectl's.")] = None,
    name: Annotated[str | None, typer.Option(help="What the cluster calls the job; else the run's name.")] = None,
    overrides: Sets = None,
    notice: Notice = NOTICE_S,
    template: Template = None,
    to: To = None,
    force: Force = False,
    submit: Submit = False,
) -> None:
    """Write a manifest: a pod a machine, a process a GPU, started again from the last checkpoint."""
    from kedge.commands import launch

    asked = launch.Asked(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        notice_s=notice,
        template=template,
        to=to,
        force=force,
        submit=submit,
    )
    with writing(Path(to or ".")):
        written = launch.launch_kubernetes(
            asked, kind=kind, at=at, runs=runs, image=image, namespace=namespace, name=name, volumes=volume or ()
        )
    _tell(written, "kubectl create -f")


@app.command()
def template(
    kind: Annotated[
        Literal["slurm", "slurm-ray", "jobset", "trainjob", "pytorchjob", "rayjob"], typer.Argument(help="Which one.")
    ],
    to: Annotated[str, typer.Option("--to", help="The file to write; - for the screen.")] = "-",
    force: Force = False,
) -> None:
    """Write a template that comes with Kedge, to edit it and give it to --template."""
    from kedge.commands import launch

    with writing(Path(to)):
        _tell(launch.write_template(kind, to, force=force), None)


def _tell(written: Any, submit: str | None) -> None:
    console = out()
    if written.file is None:
        typer.echo(written.text, nl=False)
        return
    console.print(f"wrote {written.file}", markup=False, soft_wrap=True)
    if written.said:
        console.print(written.said, markup=False, soft_wrap=True)
    elif submit:
        console.print(f"next: {submit} {quote(str(written.file))}", markup=False, soft_wrap=True)
