"""The model card: `README.md` of a model folder, with the front matter that model hubs read. Text from records, pure.

It has the inputs by content hash, the method, the measurements, and plainly what is not known. Paths of the machine
stay out of it. Left out: a licence, which only the owner of base model and data can name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from kedge.report.run.methods import what_was_run
from kedge.report.run.tables import evaluation_table, recipe_text
from kedge.report.words import short
from kedge.runs.manifest import Artefact, Manifest

_TAGS: Mapping[str, Sequence[str]] = {
    "sft": ("sft",),
    "reward": ("rlhf", "reward-model"),
    "ppo": ("rlhf", "ppo"),
    "group": ("rlhf", "rl-without-a-critic"),
    "preference": ("rlhf", "preference-optimisation"),
    "best_of_n": ("rlhf", "best-of-n"),
}
_REWARDED = (
    "It was optimised against a reward, which is a proxy for what people want; it may have learnt to please the "
    "reward instead of people.",
    "How far it has moved from its reference is measured as KL above; the further, the less the reward says.",
)

_LIMITS: Mapping[str, Sequence[str]] = {
    "sft": ("It imitates its demonstrations, their mistakes included.",),
    "reward": (
        "Its scores compare answers to the same prompt; across prompts, and as absolute numbers, they mean little.",
        "It is a proxy: a policy that is optimised hard enough against it will find what it gets wrong.",
        "It has seen one set of preferences; on other topics, languages or lengths its scores are guesses.",
    ),
    "ppo": _REWARDED,
    "group": _REWARDED,
    "preference": (
        "It was trained on comparisons of answers that it did not write; how it behaves on its own answers was not "
        "part of training.",
    ),
    "online": (
        "Its own answers were compared by a reward, which is a proxy for what people want; it may have learnt to "
        "please the reward instead of people.",
        _REWARDED[1],
    ),
    "best_of_n": (
        "It imitates those of its own answers that a reward liked best, the mistakes of the reward included.",
        "What none of its answers did, it has not learnt: it became more reliable rather than more able.",
    ),
}
"""`online` is a preference stage that makes its pairs itself."""

_MAIN_METRICS = ("heldout/", "train/loss", "train/accuracy", "reward/mean", "gold/mean", "kl/mean", "length/mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """What a card says of a model that was exported."""

    library: str
    """By which a hub knows it: transformers, peft, gguf."""
    language: str
    loading: str
    """How to load it, as code in `language`."""
    lines: Sequence[str]
    """How it was exported, and how far it is from its source."""


def model_card(
    manifest: Manifest,
    metrics: Mapping[str, float],
    *,
    evaluation: Mapping[str, Any] | None = None,
    verdict: str = "",
    export: ExportFacts | None = None,
) -> str:
    """The card of what one stage made.

    `metrics` are the last value of each (`last_values`); `evaluation` is an `evaluation.json`; `verdict` is that on
    the run or, for a reward model, on the model.
    """
    title = f"{manifest.name} / {manifest.stage}" if manifest.stage else manifest.name
    parts = [
        _front_matter(manifest, library=export.library if export else "transformers"),
        f"# {title}",
        what_was_run(manifest.kind, manifest.settings),
        *([verdict] if verdict else []),
        *(_loading(export) if export else _section("How to load it", [_code("python", _LOADING[_task(manifest)])])),
        *_section("What went in", _inputs(manifest.inputs)),
        *_section("What was measured", _measured(metrics, evaluation)),
        *_section("What is not known", [_list(_limits(manifest, evaluation))]),
        *_section("Settings", [_code("yaml", recipe_text(manifest.settings).rstrip())]),
        *_section("How it was made", [_list(_provenance(manifest))]),
    ]
    return "\n\n".join(parts) + "\n"


def card_of_export(name: str, export: ExportFacts) -> str:
    """The card of an exported model of which no run is known."""
    values = {"library_name": export.library, "pipeline_tag": "text-generation", "tags": ["kedge"]}
    unknown = [
        "How it was trained is not recorded here: it was exported from a model folder, not from a stage of a run.",
        "Its licence follows from the model that it comes from; add `license:` to the front matter before publishing.",
    ]
    parts = [
        f"---\n{recipe_text(values)}---",
        f"# {name}",
        *_loading(export),
        *_section("What is not known", [_list(iter(unknown))]),
    ]
    return "\n\n".join(parts) + "\n"


def last_values(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of every metric that was ever logged.

    >>> last_values([{"step": 1, "at": 0.0, "a": 1.0, "b": 2.0}, {"step": 2, "at": 1.0, "a": 3.0}])
    {'a': 3.0, 'b': 2.0}
    """
    return {name: value for record in records for name, value in record.items() if name not in ("step", "at")}


def _task(manifest: Manifest) -> str:
    if manifest.kind != "reward":
        return "text-generation"
    return "text-classification" if manifest.settings.get("members", 1) == 1 else "ensemble"


def _front_matter(manifest: Manifest, *, library: str) -> str:
    """Metadata for a hub. A base model is named only where it came from a hub: a folder's name would link nowhere."""
    task = _task(manifest)
    values: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-classification" if task == "ensemble" else task,
        "tags": ["kedge", *_TAGS.get(manifest.kind, (manifest.kind,))],
    }
    if base := [artefact.path for artefact in manifest.inputs if artefact.name == "from" and artefact.hash == "hub"]:
        values["base_model"] = base[0]
    return f"---\n{recipe_text(values)}---"


_LOADING = {
    "text-generation": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))""",
    "text-classification": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForSequenceClassification.from_pretrained("PATH")
text = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello, how can I help?"}]
inputs = tokenizer.apply_chat_template(text, return_tensors="pt", return_dict=True)
print(model(**inputs).logits)  # the raw score; `kedge score` also takes off the mean in config.json""",
    "ensemble": """\
# several members that are combined: kedge score PATH pairs.jsonl""",
}


def _loading(export: ExportFacts) -> Iterator[str]:
    yield from _section("How to load it", [_code(export.language, export.loading)])
    yield from _section("How it was exported", [_list(iter(export.lines))])


def _section(title: str, parts: Sequence[str]) -> Iterator[str]:
    yield f"## {title}"
    yield from parts


def _inputs(inputs: Sequence[Artefact]) -> list[str]:
    if not inputs:
        return ["Nothing is recorded."]
    hashes = ["on a hub, by name" if artefact.hash == "hub" else f"`{artefact.hash}`" for artefact in inputs]
    rows = [
        f"| {artefact.name} | {artefact.kind} | `{_place(artefact)}` | {content} |"
        for artefact, content in zip(inputs, hashes, strict=True)
    ]
    return ["\n".join(["| input | kind | name | content hash (BLAKE2b) |", "|---|---|---|---|", *rows])]


def _place(artefact: Artefact) -> str:
    """
    >>> _place(Artefact(name="from", kind="model", path="../sft/model", hash="00"))
    'sft/model'
    >>> _place(Artefact(name="data", kind="pairs", path="/home/me/data/pairs.jsonl", hash="00"))
    'pairs.jsonl'
    """
    if artefact.hash == "hub":
        return artefact.path
    path = PurePosixPath(artefact.path)
    return path.name if path.is_absolute() else "/".join(part for part in path.parts if part != "..")


def _measured(metrics: Mapping[str, float], evaluation: Mapping[str, Any] | None) -> list[str]:
    main = {name: value for name, value in metrics.items() if name.startswith(_MAIN_METRICS)}
    parts: list[str] = []
    if main:
        rows = [f"| `{name}` | {short(value)} |" for name, value in main.items()]
        parts.append("\n".join(["At the last step:", "", "| metric | value |", "|---|---|", *rows]))
    if evaluation is not None:
        table = evaluation_table(evaluation)
        lines = [f"| {' | '.join(cells)} |" for cells in (table.head, ("---",) * len(table.head), *table.rows)]
        heading = f"On {evaluation['prompts']:,} prompts, with 95 % intervals in brackets:"
        parts.append("\n".join([heading, "", *lines]))
    return parts or ["Nothing was measured."]


def _limits(manifest: Manifest, evaluation: Mapping[str, Any] | None) -> Iterator[str]:
    yield from _LIMITS.get("online" if manifest.settings.get("online") else manifest.kind, ())
    if evaluation is None and manifest.kind != "reward":
        yield "It was not compared with another model: nothing here says that it is better than what it started from."
    yield "It was not tested for harmful, false or biased answers beyond the numbers above."
    yield "Its licence follows from the base model and the data; add `license:` to the front matter before publishing."


def _provenance(manifest: Manifest) -> Iterator[str]:
    environment = manifest.environment
    yield f"Kedge {environment.kedge}, Python {environment.python}, seed {manifest.seed}"
    packages = [f"{name} {version}" for name, version in environment.packages.items()]
    if packages:
        yield ", ".join(packages)
    yield f"recipe `{manifest.recipe_hash}`, begun {manifest.created}"


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _list(lines: Iterator[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
