"""The datasets of LLaMA-Factory: what its dataset_info.json says of a name, as files of a recipe with their columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.suggest import did_you_mean
from kedge.core.yaml.source import read_tree
from kedge.importing import places
from kedge.importing.rules import Outcome, Source, changed, names, number, refused, whole

INFO: Final = "dataset_info.json"
COLUMNS: Final = {
    "prompt": "prompt", "response": "completion", "messages": "messages", "system": "system", "history": "history",
    "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label",
}  # fmt: skip
"""Parts of a dataset by LLaMA-Factory's names, and by Kedge's."""
READ_AS_THEY_ARE: Final = frozenset(
    ("instruction", "output", "conversations", "messages", "prompt", "completion", "chosen", "rejected", "kto_tag",
     "label", "system", "history", "tools", "text", "input")
)  # fmt: skip
"""Columns that Kedge knows under these names anyway."""
TAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"), "system_tag": ("system",),
    "function_tag": ("function_call",),
}  # fmt: skip
"""Names inside of messages that are known anyway."""
READ: Final = ("file_name", "hf_hub_url", "subset", "split", "columns", "tags", "num_samples", "formatting", "ranking",
               "ms_hub_url", "om_hub_url")  # fmt: skip
"""Keys of an entry that are read, or say what the rows show by themselves."""


def info(file: Path, given: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]] | None:
    """The list of datasets and its folder: in `dataset_dir`, or beside the configuration."""
    folder = str(given.get("dataset_dir", "data"))
    for start in (Path(folder), file.parent / folder, file.parent):
        if (start / INFO).is_file():
            return start, read_tree(start / INFO, noun="list of datasets").values
    return None


def entry(listed: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", listed) if isinstance(listed, dict) else {}


def data(value: Any, source: Source) -> Outcome:
    """Datasets by the names of dataset_info.json."""
    path = "stage.prompts" if source.is_rl else "stage.data"
    if source.asked.data:
        return changed(path, source.asked.data, source, "--data stands in its place")
    return _files(value, path, source)


def heldout(value: Any, source: Source) -> Outcome:
    return refused("stage `evaluate` measures") if source.is_rl else _files(value, "stage.heldout", source)


def _files(value: Any, path: str, source: Source) -> Outcome:
    listed = info(source.file, source.given)
    if listed is None:
        return refused(f"no {INFO} in `dataset_dir` or beside the configuration says what this is: give --data")
    folder, known = listed
    chosen = names(value)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{folder / INFO} has no dataset {name!r}{did_you_mean(name, known)}")
    limit = source.get("max_samples")
    shares = (
        [number(share) for share in names(source.get("interleave_probs"))] if source.get("interleave_probs") else []
    )
    entries = [_file(entry(known[name]), folder, limit, source) for name in chosen]
    left_out = [words for name in chosen if (words := _left_out(name, entry(known[name])))]
    if shares and len(shares) != len(entries):
        raise ValueError(f"{len(entries)} datasets have {len(shares)} shares (interleave_probs)")
    if len(shares) > 1:
        entries = [{**(file if isinstance(file, dict) else {"file": file}), "weight": share}
                   for file, share in zip(entries, shares, strict=True)]  # fmt: skip
    return changed(path, entries[0] if len(entries) == 1 else entries, source, "; ".join([f"by {INFO}", *left_out]))


def _left_out(name: str, listed: Mapping[str, Any]) -> str:
    """Words about what an entry says, and a recipe cannot: other names inside of messages, and parts of other kinds."""
    tags, columns = entry(listed.get("tags")), entry(listed.get("columns"))
    odd = [f"tags.{key}" for key, value in tags.items() if str(value) not in TAGS.get(key, ())]
    odd += [f"columns.{part}" for part, column in columns.items()
            if part not in COLUMNS and str(column) not in READ_AS_THEY_ARE]  # fmt: skip
    odd += [key for key in listed if key not in READ]
    return f"of {name} left out: {', '.join(sorted(odd))} (bring its rows into a layout of docs/data.md)" if odd else ""


def _file(listed: Mapping[str, Any], folder: Path, limit: Any, source: Source) -> Any:
    """One dataset: a file beside the list, or one of the hub; with its columns."""
    if listed.get("file_name"):
        file = places.place(str(folder / str(listed["file_name"])), source)
    elif listed.get("hf_hub_url"):
        file = places.data_place(
            str(listed["hf_hub_url"]), source, config=listed.get("subset"), split=listed.get("split")
        )
    else:
        raise ValueError(f"an entry of {INFO} needs file_name or hf_hub_url here; give --data")
    named = entry(listed.get("columns"))
    columns = {COLUMNS[part]: str(column) for part, column in named.items()
               if part in COLUMNS and str(column) not in READ_AS_THEY_ARE}  # fmt: skip
    rows = {"columns": columns} if columns else {}
    most = [whole(count) for count in (limit, listed.get("num_samples")) if count]
    rows |= {"limit": min(most)} if most else {}
    return {"file": file, **rows} if rows else file
