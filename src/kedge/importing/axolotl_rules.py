"""What becomes of the fields of Axolotl that are more than another name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from kedge.importing import places, preferences, training, trl
from kedge.importing.rules import (
    Outcome,
    Rule,
    Source,
    changed,
    flag,
    lora,
    number,
    refused,
    taken,
    told,
    unneeded,
    whole,
)

RENAMED: Final = {"micro_batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs"}
COLUMNS: Final = {
    "field_messages": "messages", "field": "text", "field_tools": "tools", "field_prompt": "prompt",
    "field_chosen": "chosen", "field_rejected": "rejected", "field_instruction": "prompt", "field_output": "completion",
    "field_completion": "completion", "field_label": "label", "field_system": "system",
}  # fmt: skip
KEYS: Final = frozenset(("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "tools", "weight"))
"""Keys of a message that are known."""
ROLES: Final = frozenset(
    ("system", "developer", "user", "human", "prompter", "assistant", "gpt", "bot", "model", "tool", "function",
     "observation")
)  # fmt: skip
"""Roles of messages that are known."""
BETAS: Final = ("dpo", "ipo", "kto", "orpo", "simpo")


def _as_grpo(source: Source) -> Source:
    """The same configuration under TRL's names, whose trainer Axolotl starts."""

    def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {RENAMED.get(name, name.removeprefix("trl.")): value for name, value in fields.items()}

    defaults = {**trl.defaults_of("grpo", "group", {}), **renamed(source.defaults)}
    return replace(source, given=renamed(source.given), defaults=defaults)


def of_trl(name: str) -> Rule:
    """A field of GRPO, by TRL's own rule."""

    def rule(value: Any, source: Source) -> Outcome:
        if source.trainer != "grpo":
            return beta(value, source) if name == "beta" else unneeded(f"{source.trainer} does not read it")
        return trl.TABLE[name](value, _as_grpo(source))

    return rule


def counted(name: str, otherwise: Rule) -> Rule:
    """Batches, passes and steps, which GRPO counts in completions."""

    def rule(value: Any, source: Source) -> Outcome:
        return of_trl(name)(value, source) if source.trainer == "grpo" else otherwise(value, source)

    return rule


def base_bits(value: Any, source: Source) -> Outcome:
    if value == "qlora":
        roles = {} if source.is_rl else {"stage.lora": {}}
        return Outcome(
            verdict="taken", sets={**roles, **taken("lora.base_bits", 4, source).sets}, why="adapters on 4 bits"
        )
    if value == "lora":
        return unneeded("`roles: lora`") if source.is_rl else taken("stage.lora", {}, source)
    raise ValueError(f"must be lora or qlora here, found {value!r}")


def targets(value: Any, source: Source) -> Outcome:
    return lora("targets", training.targets)(value, source)


def linear(value: Any, source: Source) -> Outcome:
    if not flag(value) or not source.is_lora:
        return unneeded("it asks for nothing")
    if source.given.get("lora_target_modules"):
        return told("lora_target_modules are named, and all linear layers are more: these")
    return taken("lora.targets", "all", source)


def beta(value: Any, source: Source) -> Outcome:
    if source.trainer not in BETAS:
        return unneeded(f"{source.trainer} does not read it")
    if source.trainer == "orpo" and source.given.get("orpo_alpha") is not None:
        return unneeded("orpo_alpha is set")
    return preferences.method({"beta": number(value)})


def datasets(prefix: str, path: str) -> Rule:
    """The first path of a list of datasets stands for all of them."""

    def rule(value: Any, source: Source) -> Outcome:
        where = "stage.prompts" if source.is_rl and path == "stage.data" else path
        if source.is_rl and path == "stage.heldout":
            return refused("stage `evaluate` measures on prompts of its own (docs/evaluate.md)")
        if source.asked.data and path == "stage.data":
            return changed(where, source.asked.data, source, "--data stands in its place")
        pattern = re.compile(rf"{prefix}\[(\d+)\]\.path")
        found = [match[1] for name in source.given if (match := pattern.fullmatch(name))]
        entries = [_dataset(f"{prefix}[{index}]", source) for index in found]
        return taken(where, entries[0] if len(entries) == 1 else entries, source)

    return rule


def _dataset(prefix: str, source: Source) -> Any:
    def part(key: str) -> Any:
        return source.given.get(f"{prefix}.{key}")

    given: Any = part("type")
    inside = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    file = places.data_place(
        str(part("path")),
        source,
        config=part("name"),
        split=part("split"),
        revision=part("revision"),
        files=part("data_files"),
    )
    named = {key: part(key) or inside.get(key) for key in COLUMNS}
    columns = {COLUMNS[key]: str(column) for key, column in named.items()
               if column and str(column) not in (COLUMNS[key], "conversations", "instruction", "output")}  # fmt: skip
    return {"file": file, "columns": columns} if columns else file


def type(value: Any, source: Source) -> Outcome:
    """Kedge knows a layout by its columns."""
    formats = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    odd = sorted(key for key in formats if key.endswith("format") or key == "system_prompt")
    if odd:
        return refused(
            f"text is made by the chat template: {', '.join(odd)} have no counterpart; bring the rows into a layout"
        )
    return unneeded("layouts are known by their columns; the chat template makes the text")


def message_keys(value: Any, source: Source) -> Outcome:
    """The keys of a message, by the names of which its parts are known."""
    given = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else [value]
    odd = sorted({str(key) for key in given} - KEYS)
    if odd:
        return refused(f"messages have {', '.join(sorted(KEYS))} here: rename {', '.join(odd)} in the rows")
    return unneeded("messages are known by these keys")


def roles(value: Any, source: Source) -> Outcome:
    named: Any = cast("dict[str, Any]", value).values() if isinstance(value, dict) else [value]
    given = {
        str(name) for group in named for name in (cast("list[Any]", group) if isinstance(group, list) else [group])
    }
    if odd := sorted(given - ROLES):
        return refused(f"no roles of messages here: rename {', '.join(odd)} in the rows")
    return unneeded("these roles are known")


def template(value: Any, source: Source) -> Outcome:
    if value == "chatml":
        return taken("chat_template", "chatml", source)
    if value == "jinja":
        return told("chat_template_jinja has it")
    return told("the model's own chat template; chatml, plain or a Jinja file replaces it")


def jinja(value: Any, source: Source) -> Outcome:
    if "{" in str(value) or "\n" in str(value):
        return refused("write the template to a Jinja file, and name it as `chat_template`")
    return taken("chat_template", places.place(str(value), source), source)


def length(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return told("max_prompt_tokens and sampling.max_new_tokens bound both parts")
    sets = {"stage.max_length": whole(value), "stage.too_long": "drop"}
    return Outcome(verdict="taken", sets=sets, why="longer ones are left out and counted")


def val_set(value: Any, source: Source) -> Outcome:
    share = number(value)
    if share == 0:
        return (
            training.eval_strategy("no", source)
            if not source.get("test_datasets[0].path")
            else unneeded("test_datasets")
        )
    if source.kind in ("reward", "preference") and share < 1:
        return taken("stage.heldout_share", share, source)
    return refused("give `heldout` a file; a stage `data` splits one (docs/data.md)")


def packing(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("rows are packed without padding and do not see each other; it changes no number")
    return told(
        "`batch` counts conversations, not packed rows of sequence_len tokens: raise it by as many as fill a row"
    )


def batch_size(value: Any, source: Source) -> Outcome:
    return changed("stage.batch", whole(value) * source.processes, source, "rows of a step")


def wandb(value: Any, source: Source) -> Outcome:
    return taken("trackers.wandb.project", str(value), source)


def rl(value: Any, source: Source) -> Outcome:
    return told(f"stage {source.kind}")


def shape(value: Any, source: Source) -> Outcome:
    return unneeded("the configuration of the model says so")
