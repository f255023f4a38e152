"""Load a causal language model from a folder or the hub: safetensors only, remote code only when asked for.

Every weight must come from the files: a model that would start with a random head is refused. Placing a model on
several devices and adding adapters happen elsewhere.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from kedge.core.errors import ModelError
from kedge.models.loading.resolve import resolve
from kedge.models.loading.unread import without_weights
from kedge.models.settings import BaseBits

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_causal(
    model: str | Path,
    *,
    dtype: DTypeName = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    attn: str | None = None,
    bits: BaseBits = 16,
    unread: bool = False,
) -> PreTrainedModel:
    """The model, in evaluation mode on `device`. `attn` names an attention of transformers; None lets it choose.

    One that is left `unread` has no weights yet: each process reads its part of them when the model is sharded.
    """
    quantised = quantisation(bits, device)
    source = resolve(model)
    loader: Any = AutoModelForCausalLM
    if unread and not quantised:
        return _load_later(source, dtype_for(dtype, device), attn=attn, trust_remote_code=trust_remote_code)
    try:
        with no_bars() if isinstance(source, Path) else nullcontext():
            loaded, report = loader.from_pretrained(
                source,
                dtype=dtype_for(dtype, device),
                attn_implementation=attn,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **quantised,
            )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(explain(str(source), error)) from error
    _check_complete(str(source), report)
    _name_decoder(loaded)
    return (loaded if "device_map" in quantised else loaded.to(device)).eval()


def _load_later(
    source: Path | str, dtype: torch.dtype, *, attn: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    name = cast(DTypeName, str(dtype).removeprefix("torch."))
    try:
        model, missing = without_weights(
            AutoModelForCausalLM,
            source,
            AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code),
            dtype=dtype,
            read=lambda: load_causal(source, dtype=name, attn=attn, trust_remote_code=trust_remote_code),
            trust_remote_code=trust_remote_code,
            **({"attn_implementation": attn} if attn else {}),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(explain(str(source), error)) from error
    _check_complete(str(source), {"missing_keys": missing})
    _name_decoder(model)
    return model


def _name_decoder(model: PreTrainedModel) -> None:
    """Let transformers find the decoder where the class of a model (Llama 4's) names a part that it does not have."""
    if model.get_decoder() is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"


def dtype_for(name: DTypeName, device: str | torch.device) -> torch.dtype:
    """The type of the weights: the one that was asked for; `auto` is float32, and on a GPU that multiplies bfloat16,
    bfloat16.

    Only the kind of device decides, never what a CPU can do: the same recipe gives the same numbers on every CPU.
    """
    if name != "auto":
        return _DTYPES[name]
    is_narrow = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_narrow else torch.float32


def quantisation(bits: BaseBits, device: str | torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a frozen model of so many bits a weight; none for 16."""
    if bits == 16:
        return {}
    refuse_bits(bits, device)
    # At 8 bits it warns at every single product that activations are cast to float16: thousands of lines a step.
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)
    config = BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def refuse_bits(bits: BaseBits, device: str | torch.device) -> None:
    """An error where so few bits a weight cannot be computed with."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise ModelError(f"weights of {bits} bits need a CUDA device, found '{device}'; use 16 bits here")
    if find_spec("bitsandbytes") is None:
        raise ModelError(f"weights of {bits} bits need 'bitsandbytes': pip install bitsandbytes")


@contextmanager
def no_bars() -> Generator[None]:
    """No progress bars of transformers inside of the block: a folder loads in seconds, and stages have their own."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _check_complete(source: str, report: dict[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source}: {len(missing)} weight(s) of a causal language model are not in the files (first: "
            f"'{missing[0]}') and would start as random numbers. Is this a reward model, or a folder saved half-way?"
        )


def without_class(error: Exception) -> bool:
    """Whether transformers has no class for this use of a model; its own words list all that it has, hundreds."""
    return "Unrecognized configuration class" in str(error)


def explain(source: str, error: Exception) -> str:
    """Why `source` could not be loaded, in words, and what to do about it."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"{source} brings its own Python code, which is not run unless you ask: set trust_remote_code: true"
    if without_class(error):
        return f"{source}: cannot be loaded as a causal language model: transformers has no such class for it"
    if Path(source).is_dir():
        return f"{source}: cannot be loaded as a causal language model: {text}"
    if "safetensors" in text:
        return f"hub model '{source}' has no safetensors weights, and pickled ones are not read: {text}"
    return (
        f"hub model '{source}' could not be loaded (no network, HF_HUB_OFFLINE set, a private model, a wrong name?); "
        f"download it to a folder and give its path, or use the alias 'smollm2-135m'. The hub client said: {text}"
    )


def auto_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder as transformers itself loads it, and with it other programs."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
