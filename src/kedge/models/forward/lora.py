"""LoRA adapters on a frozen base: adding, switching, merging, saving and loading them.

One base may carry several adapters, of which one is active at a time. The adapter of a reward model has its own score
head. Left out: other kinds of adapters, and merging into a quantised base, which would round the result to its bits.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.core.errors import ModelError
from kedge.core.suggest import did_you_mean
from kedge.models.settings import BaseBits, LoraSettings

Module = PreTrainedModel | PeftModel
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def with_lora(model: Module, settings: LoraSettings, *, name: str, seed: int) -> PeftModel:
    """`model` with one more adapter, which is active; it and its score head, if any, are all that is trainable.

    The model is changed in place. A new adapter changes no output: its B is zero, its A is drawn from the seed.
    """
    _check_name(model, name)
    base = base_of(model)
    targets = _targets(base, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        # Annotated as int in peft, which only multiplies by it.
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=targets,
        fan_in_fan_out=_is_transposed(base, targets),
        # For SEQ_CLS, peft gives each adapter its own copy of the score head.
        task_type="SEQ_CLS" if hasattr(base, "score") else "CAUSAL_LM",
    )
    return _attach(model, config, name=name, seed=seed)


def base_of(model: Module) -> PreTrainedModel:
    """The transformers model itself; adapters are inside of its layers."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def is_quantised(model: Module) -> bool:
    return bool(getattr(base_of(model), "is_quantized", False))


def trainable_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@contextmanager
def using(model: PeftModel, name: str) -> Generator[None]:
    """Adapter `name` is active inside of the block; afterwards, what was active and trainable before is so again."""
    active = cast(str, model.active_adapter)  # a list only where somebody activated several by hand
    if active == name:
        yield
        return
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(active, inference_mode=True)
        for parameter in trainable:
            parameter.requires_grad_(True)


def merge(model: PeftModel, *, name: str | None = None) -> PreTrainedModel:
    """A plain model with adapter `name` (the active one if None) added to its weights; `model` is not changed.

    Weights without an adapter are shared with `model`, so a merge takes the memory of the adapted ones alone.
    """
    base = base_of(model)
    if is_quantised(model):
        raise ModelError(
            f"{base.name_or_path}: an adapter cannot be merged into a quantised base without rounding it; "
            "save the adapter, load the base in 16 bits, and merge there"
        )
    # New parameters over the same storage: a safe merge allocates new storage for those that it changes.
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()
    }
    twin: Any = copy.deepcopy(model, shared)
    twin.set_adapter(name or model.active_adapter, inference_mode=True)
    return twin.merge_and_unload(safe_merge=True)


def merge_anew(model: PeftModel, base: PreTrainedModel, *, name: str | None = None) -> PreTrainedModel:
    """As `merge`, but into `base`, which is changed in place: the base of `model` loaded again in 16 or 32 bits."""
    name = name or cast(str, model.active_adapter)
    config = copy.deepcopy(cast(LoraConfig, model.peft_config[name]))
    learnt = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    weights = {key: tensor.detach().to(base.device) for key, tensor in learnt.items()}
    return merge(fill_adapter(base, config, weights, name=name, where=Path(str(base.name_or_path))))


def save_adapters(model: PeftModel, folder: Path, names: Sequence[str]) -> None:
    """Each adapter in a folder of its name below `folder`, in peft's format."""
    model.save_pretrained(str(folder), selected_adapters=list(names), save_embedding_layers=False)
    (folder / "README.md").unlink()  # peft's model card with nothing filled in


def save_adapter(model: PeftModel, folder: Path, *, name: str) -> None:
    """One adapter in `folder` itself."""
    save_adapters(model, folder, [name])
    own = folder / name  # peft writes the adapter that it calls `default` without a folder of its own
    if own.is_dir():
        for path in own.iterdir():
            path.rename(folder / path.name)
        own.rmdir()


def load_adapter(model: Module, folder: Path, *, name: str) -> PeftModel:
    """`model` with the adapter that `folder` holds. Every weight must come from the file; nothing is unpickled."""
    config, weights = read_adapter(folder)
    return fill_adapter(model, config, weights, name=name, where=folder)


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The settings and the weights of the adapter in `folder`, its score head included if it has one."""
    for part in (_CONFIG, _WEIGHTS):
        if not (folder / part).is_file():
            raise ModelError(f"{folder}: no {part}; this is not a LoRA adapter saved with safetensors")
    try:
        config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be read as a LoRA adapter: {error}") from error
    config.base_model_name_or_path = None  # peft sets it from the model, and warns when a base has moved
    return config, weights


def fill_adapter(
    model: Module, config: LoraConfig, weights: dict[str, torch.Tensor], *, name: str, where: Path
) -> PeftModel:
    """`model` with a new adapter of exactly these weights; one too many or too few is an error that names `where`."""
    _check_name(model, name)
    adapted = _attach(model, config, name=name, seed=0)
    expected = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    for key in sorted(expected.keys() ^ weights.keys()):
        side = "is not in the file and would start as random numbers" if key in expected else "has no place in the base"
        raise ModelError(f"{where / _WEIGHTS}: weight '{key}' {side}; is this the adapter of another model?")
    for key, tensor in expected.items():
        if tensor.shape != weights[key].shape:
            shape, expected_shape = tuple(weights[key].shape), tuple(tensor.shape)
            raise ModelError(f"{where / _WEIGHTS}: weight '{key}' has shape {shape}, the base needs {expected_shape}")
    set_peft_model_state_dict(adapted, weights, adapter_name=name)
    return adapted


def quantisation(bits: BaseBits, device: str | torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a frozen base of so many bits a weight; none for 16."""
    if bits == 16:
        return {}
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise ModelError(f"a base of {bits} bits needs a CUDA device, found '{device}'; use 16 bits here")
    if find_spec("bitsandbytes") is None:
        raise ModelError(f"a base of {bits} bits needs 'bitsandbytes': pip install bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "score"],
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _attach(model: Module, config: LoraConfig, *, name: str, seed: int) -> PeftModel:
    # Adapters are initialised on the CPU, so its generator is the only one to seed and to restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
            model.set_adapter(name)
            return model
        return cast(PeftModel, get_peft_model(model, config, adapter_name=name))


def _check_name(model: Module, name: str) -> None:
    if isinstance(model, PeftModel) and name in model.peft_config:
        raise ModelError(f"an adapter named '{name}' is already there ({', '.join(model.peft_config)})")
    # peft mistakes a name that is part of its own prefix `lora_` for that prefix.
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in "lora_":
        raise ModelError(f"adapter name '{name}': use letters, digits, '-' and '_', not a part of 'lora_'")


def _linears(base: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the transformer blocks by the last part of their names, with or without an adapter."""
    decoder = cast(nn.Module, base.get_decoder())
    linears: dict[str, nn.Module] = {}
    for path, module in decoder.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in path:
            linears[path.removesuffix(".base_layer").rpartition(".")[2]] = module
    return linears


def _targets(base: PreTrainedModel, names: str | Sequence[str]) -> list[str]:
    """The names of the layers that get an adapter: these, or all of them for a string (`all`)."""
    known = _linears(base)
    if isinstance(names, str):
        return sorted(known)
    for name in names:
        if name not in known:
            raise ModelError(
                f"LoRA target '{name}': no linear layer of {type(base).__name__} has that name"
                f"{did_you_mean(name, known)}; there are {', '.join(sorted(known))}"
            )
    return sorted(names)


def _is_transposed(base: PreTrainedModel, targets: Sequence[str]) -> bool:
    """Whether the matrices are stored transposed, as GPT-2's are; peft has to know."""
    known = _linears(base)
    return any(isinstance(known[name], Conv1D) for name in targets)
