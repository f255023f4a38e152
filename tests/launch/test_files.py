"""What `kedge launch` writes is what the schedulers read: by the models of their own packages where there are some."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_attacks import IN_GROUPS, RECIPE
from ruamel.yaml import YAML

from kedge.launch import sbatch
from kedge.launch.render import shipped_template

Kedge = Callable[..., Any]
POD = ("--image", "registry.example/kedge:1", "--volume", "data:/data", "--at", "/data/r.yaml")
RAY_JOB = {
    "entrypoint": str,
    "runtimeEnvYAML": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": dict,
}
"""Fields of ray.io/v1 RayJob that we write (KubeRay's API reference), for want of a package with its models."""
RAY_GROUP = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": dict,
    "template": dict,
}


def manifest(done: Any) -> Any:
    assert done.code == 0, done.err
    return YAML(typ="safe", pure=True).load(done.out)


def deserialised(client: Any, document: Any, name: str) -> Any:
    """A document through a model of OpenAPI's generator and back: what the model does not know is lost on the way."""
    model = client.deserialize(SimpleNamespace(data=json.dumps(document)), name)
    return client.sanitize_for_serialization(model)


def test_a_jobset_is_made_of_jobs_of_kubernetes(kedge: Kedge) -> None:
    from kubernetes.client import ApiClient

    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--nodes", "4", "--to", "-"))
    (job,) = document["spec"]["replicatedJobs"]
    assert deserialised(ApiClient(), job["template"], "V1JobTemplateSpec") == job["template"]


@pytest.mark.slow  # some 700 modules are imported
@pytest.mark.parametrize("nodes", ["1", "4"])
def test_a_jobset_and_a_trainjob_are_what_kubeflow_trainer_reads(kedge: Kedge, nodes: str) -> None:
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

    for kind, model in (("jobset", JobsetV1alpha2JobSet), ("trainjob", TrainerV1alpha1TrainJob)):
        document = manifest(
            kedge("launch", "kubernetes", "r.yaml", *POD, "--kind", kind, "--nodes", nodes, "--to", "-")
        )
        assert model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_pytorchjob_is_what_the_training_operator_reads(kedge: Kedge, nodes: int) -> None:
    from kubeflow.training.api_client import ApiClient

    arguments = ("--kind", "pytorchjob", "--nodes", str(nodes), "--namespace", "team", "--gpus-per-node", "4")
    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, *arguments, "--to", "-"))
    assert deserialised(ApiClient(), document, "KubeflowOrgV1PyTorchJob") == document
    replicas = {role: spec["replicas"] for role, spec in document["spec"]["pytorchReplicaSpecs"].items()}
    assert replicas == ({"Master": 1} if nodes == 1 else {"Master": 1, "Worker": 3})
    assert document["spec"]["nprocPerNode"] == "4"
    assert document["metadata"]["namespace"] == "team"


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_a_rayjob_has_known_fields_and_pods_of_kubernetes(kedge: Kedge, nodes: str, tmp_path: Path) -> None:
    from kubernetes.client import ApiClient

    (tmp_path / "r.yaml").write_text(IN_GROUPS)
    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--nodes", nodes, "--to", "-"))
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayJob")
    spec = document["spec"]
    assert {name: type(value) for name, value in spec.items()} == RAY_JOB
    assert spec["entrypoint"] == "kedge run /data/r.yaml --runs=/data/runs --resume-if-begun"
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}
    assert YAML(typ="safe", pure=True).load(spec["runtimeEnvYAML"]) == environment
    cluster = spec["rayClusterSpec"]
    groups = [cluster.pop("headGroupSpec"), *cluster.pop("workerGroupSpecs", [])]
    assert cluster == {}
    assert [group.get("replicas", 1) for group in groups] == ([1] if nodes == "1" else [1, 2])
    for group in groups:
        assert all(isinstance(value, RAY_GROUP[name]) for name, value in group.items())
        assert deserialised(ApiClient(), group["template"], "V1PodTemplateSpec") == group["template"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


@pytest.mark.slow
def test_the_models_would_find_a_key_that_they_do_not_know(kedge: Kedge) -> None:
    from kubeflow.training.api_client import ApiClient
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--to", "-"))
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 1
    assert JobsetV1alpha2JobSet.from_dict(document).to_dict() != document
    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--kind", "pytorchjob", "--to", "-"))
    document["spec"]["nprocPerNod"] = "8"
    assert deserialised(ApiClient(), document, "KubeflowOrgV1PyTorchJob") != document


def test_pods_share_the_disk_that_the_recipe_and_the_runs_are_on_and_are_told_in_time(kedge: Kedge) -> None:
    document = manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--notice", "300", "--nodes", "2", "--to", "-"))
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert claims[mounts["/data"]] == {"claimName": "data"}
    assert container["workingDir"] == "/data"
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "300"} in container["env"]
    assert "--master-addr=pair-node-0-0.pair" in container["command"]


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("nodes", ["1", "4"])
def test_an_sbatch_file_is_a_script_with_options_that_sbatch_has(
    kedge: Kedge, nodes: str, groups: bool, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(IN_GROUPS if groups else RECIPE)
    arguments = ("--time", "1-12", "--account", "lab", "--partition", "gpu,big", "--sbatch", "constraint=h100&ib")
    done = kedge("launch", "slurm", "r.yaml", "--nodes", nodes, *arguments, "--sbatch", "mem=0")
    assert done.out.splitlines() == ["wrote pair.sbatch", "next: sbatch pair.sbatch"]
    script = (tmp_path / "pair.sbatch").read_text()
    assert list(sbatch.problems(script)) == []
    subprocess.run(["bash", "-n", "pair.sbatch"], check=True)
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    expected = {
        "job-name=pair",
        f"nodes={nodes}",
        f"ntasks-per-node={1 if groups else 8}",
        "gpus-per-node=8",
        "time=1-12",
        "account=lab",
        "partition=gpu,big",
        "constraint='h100&ib'",
        "mem=0",
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        f"signal={'B:' if groups else ''}TERM@120",
    }
    assert {*options} == expected | ({"exclusive"} if groups else set())
    if groups:
        assert script.count("ray start") == (1 if nodes == "1" else 2)
    else:
        assert "\n    kedge run r.yaml --runs=runs --resume-if-begun\n" in script


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo\n", (1, "begins with #!")),
        ("#!/bin/bash\n#SBATCH --partion=gpu\n", (2, "did you mean 'partition'")),
        ("#!/bin/bash\necho\n#SBATCH --nodes=2\n", (3, "left out in silence")),
        ("#!/bin/bash\n#SBATCH nodes 2\n", (2, "written as #SBATCH --name=value")),
        ("#!/bin/bash\n#SBATCH --qos\n", (2, "--qos needs a value")),
    ],
)
def test_what_sbatch_would_refuse_or_skip_is_found(script: str, problem: tuple[int, str]) -> None:
    ((line, text),) = sbatch.problems(script)
    assert line == problem[0]
    assert problem[1] in text


def test_a_container_under_slurm_sees_the_folder_and_the_runs(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("launch", "slurm", "r.yaml", "--image", "r.example#team/kedge:1", "--runs", "out", "--to", "-")
    mounts = f"--container-mounts={tmp_path}:{tmp_path},{tmp_path}/out:{tmp_path}/out"
    assert f"--container-image='r.example#team/kedge:1' {mounts} --container-workdir={tmp_path} \\\n" in done.out
    assert f"kedge run r.yaml --runs={tmp_path}/out" in done.out


SHARDED = ("--set", "placement.weights=shard", "--set", "stages.sft.batch=16")
REFUSED = [
    (("slurm", "no.yaml"), "no.yaml"),
    (("slurm", "r.yaml", "--set", "stages.sft.epoch=1"), "did you mean 'epochs'"),
    (("slurm", "r.yaml", "--set", "stages.sft.from=sft"), "sft"),
    (("slurm", "r.yaml", "--nodes", "2", "--set", "placement.processes=8"), "2 node(s) × 8 make 16"),
    (("slurm", "r.yaml", "--nodes", "200"), "1,600 processes; at most 1,024"),
    (("slurm", "r.yaml", "--set", "device=cpu"), "device: cpu"),
    (("slurm", "r.yaml", "--gpus-per-node", "0"), "--processes-per-node says how many"),
    (("slurm", "r.yaml", "--processes-per-node", "9"), "at most 8"),
    (("slurm", "r.yaml", "--time", "soon"), "found 'soon'"),
    (("slurm", "r.yaml", "--time", "2"), "nothing would be learnt"),
    (("slurm", "r.yaml", "--sbatch", "constrain=x"), "did you mean 'constraint'"),
    (("slurm", "r.yaml", "--sbatch", "time=1"), "use --time"),
    (("slurm", "r.yaml", "--sbatch", "qos"), "--sbatch qos: this option of sbatch needs a value"),
    (("slurm", "r.yaml", "--sbatch", "mem=8G", "--sbatch", "mem=9G"), "--sbatch mem: given twice"),
    (("slurm", "r.yaml", "--sbatch", "ntasks=4"), "--nodes and --processes-per-node say"),
    (("slurm", "r.yaml", "--sbatch", "gres=disk:1,gpu:4"), "--sbatch gres: how many GPUs there are"),
    (("slurm", "r.yaml", "--sbatch", "array=1-4"), "would write one run"),
    (("slurm", "r.yaml", "--nodes", "4", *SHARDED), "an optimiser step has 16 rows, and 32 processes share them"),
    (("slurm", "r.yaml", *SHARDED, "--set", "stages.sft.memory.offload=[optimiser]"), "; leave it out: each process"),
    (("slurm", "r.yaml", "--image", "a", "--python", "p"), "give one of the two"),
    (("slurm", "r.yaml", "--to", "r.yaml", "--force"), "this is what is read"),
    (("slurm", "r.yaml", "--to", "-", "--submit"), "leave out --to -"),
    (("kubernetes", "r.yaml", "--volume", "data:/data", "--at", "/data/r.yaml"), "containers/Dockerfile"),
    (("kubernetes", "r.yaml", "--image", "a"), "pods do not share"),
    (("kubernetes", "r.yaml", *POD, "--runs", "/scratch/runs"), "where runs are written"),
    (("kubernetes", "r.yaml", *POD, "--runs", "/data/../scratch"), "absolute path"),
    (("kubernetes", "r.yaml", *POD, "--volume", "more:/data"), "two claims"),
    (("kubernetes", "r.yaml", *POD, "--volume", "more:/data/"), "two claims"),
    (("kubernetes", "r.yaml", *POD, "--volume", "more:/dev/shm"), "hides /dev/shm"),
    (("kubernetes", "r.yaml", *POD, "--at", "/data/"), "name its file: --at /data/r.yaml"),
    (("kubernetes", "r.yaml", *POD, "--volume", "data"), "CLAIM:PATH"),
    (("kubernetes", "r.yaml", *POD, "--kind", "rayjob"), "a RayJob is for placement.groups"),
    (("kubernetes", "r.yaml", *POD, "--set", f"name={'a' * 60}"), "--name"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(words)[:60] for words, _ in REFUSED])
def test_what_cannot_be_launched_is_refused_with_words(
    kedge: Kedge, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    before = (tmp_path / "r.yaml").read_text()
    done = kedge("launch", *arguments)
    assert done.code == 2
    assert message in done.err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]
    assert (tmp_path / "r.yaml").read_text() == before


def test_groups_that_a_stage_does_not_allow_are_refused_before_a_file_is_written(kedge: Kedge, tmp_path: Path) -> None:
    ppo = "stages: {ppo: {kind: ppo, prompts: p.jsonl, reward: {kind: regex, pattern: a}, roles: lora}}"
    groups = "placement: {groups: {learner: {gpus: 4}, critic: {roles: [critic]}}}"
    (tmp_path / "r.yaml").write_text(f"kedge: 1\nname: pair\nmodel: tiny\n{ppo}\n{groups}\n")
    for arguments in (("slurm", "r.yaml"), ("kubernetes", "r.yaml", *POD)):
        done = kedge("launch", *arguments)
        assert (done.code, "what is shared cannot be apart; set roles: separate" in done.err) == (2, True), done.err
        assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize("option", ["container-id=3", "exclusive", "gres=disk:1"])
def test_options_of_sbatch_come_as_they_are_given(kedge: Kedge, option: str) -> None:
    assert f"#SBATCH --{option}\n" in kedge("launch", "slurm", "r.yaml", "--sbatch", option, "--to", "-").out


def test_every_option_of_sbatch_that_is_treated_apart_is_one() -> None:
    assert {*sbatch.OWN, *sbatch.BARE, *sbatch.CONTRADICTING} <= sbatch.KNOWN
    assert all(name.isascii() and not name.endswith("-") for name in sbatch.KNOWN)


def test_gpus_of_vllm_do_not_learn(kedge: Kedge) -> None:
    sets = ("stages.ppo={kind: ppo, from: sft, prompts: p.jsonl, reward: {kind: regex, pattern: a}, "
            "generator: {kind: vllm, python: python3, gpus: 2}}")  # fmt: skip
    done = kedge("launch", "slurm", "r.yaml", "--set", sets, "--to", "-")
    assert (done.code, "--ntasks-per-node=6\n" in done.out) == (0, True), done.err
    done = kedge("launch", "slurm", "r.yaml", "--set", sets, "--nodes", "2")
    assert done.code == 2
    assert "generator.servers" in done.err


def test_groups_of_a_recipe_decide_what_is_written(kedge: Kedge, tmp_path: Path) -> None:
    groups = "{learner: {gpus: 6}, critic: {roles: [critic]}}"  # a group without gpus has one
    (tmp_path / "r.yaml").write_text(f"{RECIPE}placement: {{groups: {groups}}}\n")
    assert "ray start --head" in kedge("launch", "slurm", "r.yaml", "--to", "-").out
    assert manifest(kedge("launch", "kubernetes", "r.yaml", *POD, "--to", "-"))["kind"] == "RayJob"
    done = kedge("launch", "kubernetes", "r.yaml", *POD, "--gpus-per-node", "6")
    assert (done.code, "7 GPUs in all" in done.err) == (2, True)
    assert kedge("launch", "slurm", "r.yaml", "--gpus-per-node", "7", "--to", "-").code == 0
    done = kedge("launch", "kubernetes", "r.yaml", *POD, "--kind", "jobset")
    assert (done.code, "placement.groups needs Ray" in done.err) == (2, True)
    done = kedge("launch", "slurm", "r.yaml", "--image", "a:1")
    assert (done.code, "use --python" in done.err) == (2, True)


def test_groups_of_processes_without_gpus_ask_for_none(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"{IN_GROUPS}device: cpu\n")
    done = kedge("launch", "slurm", "r.yaml")
    assert (done.code, "device: cpu; use --gpus-per-node 0, or another device" in done.err) == (2, True)
    assert "--num-gpus=0" in kedge("launch", "slurm", "r.yaml", "--gpus-per-node", "0", "--to", "-").out


def test_a_file_that_is_there_stays_unless_forced(kedge: Kedge, tmp_path: Path) -> None:
    assert kedge("launch", "slurm", "r.yaml").code == 0
    (tmp_path / "pair.sbatch").write_text("edited")
    assert kedge("launch", "slurm", "r.yaml").code == 2
    assert (tmp_path / "pair.sbatch").read_text() == "edited"
    assert kedge("launch", "slurm", "r.yaml", "--force").code == 0
    assert (tmp_path / "pair.sbatch").read_text() != "edited"


@pytest.mark.parametrize(
    ("program", "arguments", "given"),
    [
        ("sbatch", ("slurm", "r.yaml"), "{home}/pair.sbatch"),
        ("kubectl", ("kubernetes", "r.yaml", *POD), "create -f {home}/pair.jobset.yaml"),
    ],
)
def test_only_submit_submits(
    kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, arguments: tuple[str, ...], given: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    done = kedge("launch", *arguments, "--submit")
    assert (done.code, f"there is no {program} on PATH" in done.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"], "nothing is written that cannot be submitted"
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / program
    tool.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/given\necho job 7\n')
    tool.chmod(0o755)
    assert kedge("launch", *arguments).code == 0
    assert not (tmp_path / "given").exists()
    done = kedge("launch", *arguments, "--submit", "--force")
    assert (done.code, done.out.splitlines()[-1]) == (0, "job 7")
    assert (tmp_path / "given").read_text().strip() == given.format(home=tmp_path)
    tool.write_text("#!/bin/bash\necho no such queue >&2\nexit 3\n")
    done = kedge("launch", *arguments, "--submit", "--force")
    assert (done.code, "(exit 3): no such queue" in done.err) == (1, True)


def test_a_template_of_the_users_is_rendered_the_same_way(kedge: Kedge, tmp_path: Path) -> None:
    assert kedge("launch", "template", "slurm", "--to", "own.j2").code == 0
    assert (tmp_path / "own.j2").read_text() == shipped_template("slurm")
    assert kedge("launch", "template", "slurm").out == shipped_template("slurm")
    ours = kedge("launch", "slurm", "r.yaml", "--to", "-").out
    assert kedge("launch", "slurm", "r.yaml", "--template", "own.j2", "--to", "-").out == ours
    (tmp_path / "own.j2").write_text("#!/bin/bash\n#SBATCH --nodes={{ nodes }}\ncd {{ folder }}\nsrun {{ command }}\n")
    done = kedge("launch", "slurm", "r.yaml", "--template", "own.j2", "--runs", "my runs", "--to", "-")
    assert done.out.endswith("srun kedge run r.yaml '--runs=my runs' --resume-if-begun\n")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("{{ nodez }}", (), "'nodez' is undefined; a template of this kind may use account, command"),
        ("{% if %}", (), "own.j2: line 1"),
        ("{{ ''.__class__.__mro__ }}", (), "unsafe"),
        ("{{ time }}", (), "a template cannot print it"),
        ("#!/bin/bash\n#SBATCH --node=2\n", (), "did you mean 'nodes'"),
        ("#!/bin/bash\n", ("--runs", "$(touch x)"), "'$' has a meaning to shells"),
    ],
)
def test_a_template_that_cannot_be_used_is_told_with_its_place(
    kedge: Kedge, tmp_path: Path, text: str, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "own.j2").write_text(text)
    done = kedge("launch", "slurm", "r.yaml", "--template", "own.j2", *arguments)
    assert done.code == 2
    assert message in done.err.replace("\n", " ")
    assert not (tmp_path / "pair.sbatch").exists()


def test_a_manifest_of_a_template_must_be_an_object_of_kubernetes(kedge: Kedge, tmp_path: Path) -> None:
    for text, message in (("kind: [", "is no YAML"), ("a: 1\n", "no Kubernetes object")):
        (tmp_path / "own.j2").write_text(text)
        done = kedge("launch", "kubernetes", "r.yaml", *POD, "--template", "own.j2")
        assert (done.code, message in done.err.replace("\n", " ")) == (2, True)
