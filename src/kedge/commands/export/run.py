"""`kedge export`: written beside its place, read back, compared with its source, and only then put there.

What the format itself rounds away is told; anything beyond that is a fault, and nothing stays.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from kedge import __version__
from kedge.commands.export.formats import (
    Format,
    Material,
    SavedDType,
    Target,
    adapter_format,
    folder_format,
    gguf_format,
)
from kedge.commands.export.push import Hub
from kedge.commands.export.source import Source, find_source, saved_dtype
from kedge.core.errors import ConfigError, ModelError, NumericsError
from kedge.core.files import readable_bytes, write_json, write_text
from kedge.data.examples import Message
from kedge.data.template import encode_prompt, stop_ids
from kedge.data.tokenizer import load_tokenizer, tokens_of
from kedge.models.loading.describe import window_of
from kedge.models.loading.fidelity import Fidelity, compare, next_token_logprobs, unequal_weights
from kedge.models.loading.gguf_write import Quantisation, needs_gguf
from kedge.models.loading.load import load_causal
from kedge.models.loading.resolve import resolve
from kedge.models.loading.start import whole_folder
from kedge.report.card import ExportFacts, card_of_export
from kedge.report.writing import export_card

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

RECORD = "export.json"
_IN_GGUF: Sequence[Target] = ("gguf", "ollama")
_UNEXPLAINED, _UNMERGED = 1e-4, 1e-3
"""Nats a token, in the mean, by which two computations in float32 may differ: of the same weights, and of a merged
adapter and one on its base."""
_LONGEST = 192
"""Tokens of a text that is compared."""
_TEXTS = (
    "The harbour was quiet that morning. Two boats had come in before dawn, and nobody on the quay could say what they "
    "carried or who had paid for it.",
    "In 1987 the town had 41,306 inhabitants; by 2021 it was 38,950, or 5.7 % fewer. What is 12 * (7 + 5)?",
    "def mean(values):\n    if not values:\n        raise ValueError('none')\n    return sum(values) / len(values)\n",
    'Grüße aus Zürich! Où est la gare? Η θάλασσα. 海は静かだ。 Isn\'t it? — "Yes," she said.',
)
_QUESTIONS = ("Which of the two is larger, a hectare or an acre?", "Write two sentences about rain.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What was asked for; None is the target's own choice."""

    model: str
    to: Target
    output: Path | None = None
    dtype: SavedDType | None = None
    quantise: Quantisation | None = None
    push: str | None = None
    public: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    folder: Path
    to: Target
    kind: str
    """How the weights are stored: float32, bfloat16, float16, f16, q8_0, or `adapter`."""
    bytes: int
    fidelity: Fidelity
    usage: str
    """What to type next."""
    address: str | None
    """Where it was pushed to."""


def export(request: ExportRequest) -> Exported:
    """The model in its new form, in a folder of its own, and on the hub where that is asked for."""
    hub = _refuse_unfit(request)
    source = find_source(request.model)
    target = request.output or Path(f"{source.name}-{request.to}")
    _refuse_place(target, source, force=request.force)
    if request.to in _IN_GGUF:
        needs_gguf()
    if hub is not None:
        hub.check()
    if request.to == "adapter" and source.adapter is None:
        raise ModelError(
            f"{request.model}: no adapter here; it is in the folder of a stage that trained with `lora`, beside the "
            "model. Where all weights were trained, export the model itself: --to hf"
        )
    tokenizer = load_tokenizer(resolve(source.place))
    material = Material(
        name=source.name,
        model=load_causal(source.place, dtype="float32"),
        tokenizer=tokenizer,
        ends=_ends(tokenizer),
    )
    kind, fmt = _format(request, source, material)
    texts = _texts(material)
    before = next_token_logprobs(material.model, texts)
    with whole_folder(target, replaces=(RECORD,)) as partial:
        fmt.write(partial)
        fmt.round()
        _check_tokens(fmt, partial, tokenizer)
        after = _read_back(fmt, partial, material, texts)
        fidelity = compare(before, after, texts)
        usage = _usage(request.to, target, source.name, window_of(material.model.config))
        facts = _facts(request.to, kind, fidelity, source)
        card = export_card(source.stage, facts) if source.stage is not None else card_of_export(source.name, facts)
        write_text(partial / "README.md", card)
        write_json(partial / RECORD, _record(request.to, kind, fidelity, source))
    address = hub.upload(target, message=f"{source.name} as {request.to}, by Kedge {__version__}") if hub else None
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return Exported(
        folder=target, to=request.to, kind=kind, bytes=size, fidelity=fidelity, usage=usage, address=address
    )


def _refuse_unfit(request: ExportRequest) -> Hub | None:
    """Raise for options that do not go together; the hub, where something is to be pushed."""
    if request.quantise is not None and request.to not in _IN_GGUF:
        raise ConfigError(f"--quantise {request.quantise}: only for --to gguf and ollama; for {request.to} use --dtype")
    if request.dtype is not None and request.to not in ("hf", "vllm"):
        other = "use --quantise" if request.to in _IN_GGUF else "an adapter is saved in float32"
        raise ConfigError(f"--dtype {request.dtype}: only for --to hf and vllm; {other}")
    if request.public and request.push is None:
        raise ConfigError("--public goes with --push: nothing leaves this machine without it")
    return Hub(request.push, is_public=request.public) if request.push is not None else None


def _refuse_place(target: Path, source: Source, *, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: a file; an export is a folder")
    inside = Path(source.place).resolve() if Path(source.place).is_dir() else None
    if inside is not None and (target.resolve() == inside or inside in target.resolve().parents):
        raise ConfigError(f"{target}: inside of the model that is exported; write to another folder (--output)")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{target}: {above} may not be written to; name another folder (--output)")
    if not target.exists():
        return
    if not (target / RECORD).is_file():
        raise ConfigError(f"{target}: there already, and no export of Kedge; name another folder (--output)")
    if not force:
        raise ConfigError(f"{target}: there already; --force replaces it, or name another folder (--output)")


def _format(request: ExportRequest, source: Source, material: Material) -> tuple[str, Format]:
    if request.to in _IN_GGUF:
        quantisation = request.quantise or "f16"
        return quantisation, gguf_format(material, quantisation=quantisation, ollama=request.to == "ollama")
    if request.to == "adapter":
        assert source.adapter is not None  # refused before
        saved = saved_dtype(source.place)
        return "adapter", adapter_format(material, source.adapter, saved=saved, keeps_path=request.push is None)
    dtype = request.dtype or ("bfloat16" if request.to == "vllm" else saved_dtype(source.place))
    return dtype, folder_format(material, dtype=dtype, has_marks=request.to == "hf")


def _ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    if tokenizer.chat_template:
        return stop_ids(tokenizer)
    return frozenset([tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else [])


def _texts(material: Material) -> list[list[int]]:
    """Texts of several kinds, and questions as the model's own template writes them, cut to what has room."""
    tokenizer, window = material.tokenizer, window_of(material.model.config)
    texts = [tokens_of(tokenizer, text) for text in _TEXTS]
    if tokenizer.chat_template:
        texts += [encode_prompt(tokenizer, (Message("user", question),)) for question in _QUESTIONS]
    return [text[: min(_LONGEST, window or _LONGEST)] for text in texts]


def _check_tokens(fmt: Format, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The exported tokenizer must make the same tokens of a conversation; without a template, of plain texts."""
    exported = fmt.tokenizer(folder)
    if tokenizer.chat_template:
        roles = ("user", "assistant", "user", "assistant", "user")
        contents = (*_TEXTS, _QUESTIONS[0])
        messages = tuple(Message(role, content) for role, content in zip(roles, contents, strict=True))
        ours, theirs = (encode_prompt(side, messages) for side in (tokenizer, exported))
        pairs = [("a conversation", ours, theirs)]
    else:
        pairs = [(text, tokens_of(tokenizer, text), tokens_of(exported, text)) for text in _TEXTS]
    for text, ours, theirs in pairs:
        if ours != theirs:
            at = next((at for at, (left, right) in enumerate(zip(ours, theirs, strict=False)) if left != right), None)
            where = f"token {at}" if at is not None else f"{len(ours)} tokens and {len(theirs)}"
            raise ModelError(
                f"the exported tokenizer cuts {text[:40]!r} otherwise than the model's own (they differ at {where}); "
                "nothing was exported"
            )


def _read_back(fmt: Format, folder: Path, material: Material, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probs of the exported model; anything in it beyond what the format rounds away is an error."""
    exported = fmt.read(folder)
    if fmt.has_all_weights and (wrong := unequal_weights(material.model, exported)):
        raise NumericsError(
            f"the exported model is not its source: {len(wrong)} weight(s), first {wrong[0]}, differ beyond what the "
            "format rounds away; nothing was exported"
        )
    after = next_token_logprobs(exported, texts)
    saved = fmt.as_saved(exported)
    again = after if saved is exported else next_token_logprobs(saved, texts)
    rest = compare(next_token_logprobs(material.model, texts), again, texts).mean_change
    limit = _UNEXPLAINED if fmt.has_all_weights else _UNMERGED
    if not rest <= limit:  # a mean that is not a number is not below the limit either
        raise NumericsError(
            f"the exported model is not its source: log-probs differ by {rest:.4g} nats a token beyond what the format "
            f"rounds away (at most {limit}); nothing was exported"
        )
    return after


def _usage(target: Target, folder: Path, name: str, window: int | None) -> str:
    place = quote(str(folder))
    if target == "vllm":
        return f"vllm serve {place} --served-model-name {name}" + (f" --max-model-len {window}" if window else "")
    if target == "ollama":
        return f"ollama create {name.lower()} -f {quote(str(folder / 'Modelfile'))} && ollama run {name.lower()}"
    if target == "gguf":
        return f"llama-cli -m {place}/*.gguf"
    if target == "adapter":
        return f"peft.PeftModel.from_pretrained(base, {str(folder)!r})"
    return f"kedge chat {place}"


_LOADING: dict[Target, tuple[str, str, str]] = {
    "hf": (
        "transformers",
        "python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\nmodel = AutoModelForCausalLM.from_pretrained("PATH")',
    ),
    "vllm": ("transformers", "bash", "vllm serve PATH"),
    "adapter": (
        "peft",
        "python",
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        'base = AutoModelForCausalLM.from_pretrained("BASE")\nmodel = PeftModel.from_pretrained(base, "PATH")',
    ),
    "gguf": ("gguf", "bash", "llama-cli -m PATH/*.gguf"),
    "ollama": ("gguf", "bash", "ollama create NAME -f PATH/Modelfile\nollama run NAME"),
}


def _facts(target: Target, kind: str, fidelity: Fidelity, source: Source) -> ExportFacts:
    library, language, loading = _LOADING[target]
    return ExportFacts(
        library=library,
        language=language,
        loading=loading,
        lines=[f"as {target}, weights as {kind}, by Kedge {__version__}", f"beside its source: {told(fidelity)}"],
    )


def told(fidelity: Fidelity) -> str:
    """One sentence about how far an export is from its source."""
    return (
        f"mean |Δ log-prob| {fidelity.mean_change:.5f} nats a token, KL {max(fidelity.kl, 0.0):.6f}, the same "
        f"likeliest token at {fidelity.same_top:.1%} of {fidelity.tokens:,} positions"
    )


def _record(target: Target, kind: str, fidelity: Fidelity, source: Source) -> dict[str, Any]:
    return {"kedge": __version__, "to": target, "weights": kind, "model": source.name, "fidelity": asdict(fidelity)}


def summary(exported: Exported) -> list[str]:
    """What is told of an export, in lines."""
    lines = [
        f"{exported.folder}: {exported.to}, {exported.kind}, {readable_bytes(exported.bytes)}",
        f"beside its source: {told(exported.fidelity)}",
    ]
    if exported.address:
        lines.append(f"pushed to {exported.address}")
    return [*lines, exported.usage]
