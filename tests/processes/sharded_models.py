"""Models that are read and saved in parts beside what one process reads and saves: functions of a world."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kedge.core.world import World
from kedge.models.forward.lora import has_adapters, with_lora
from kedge.models.forward.parts import as_part, gathered, local, part_of
from kedge.models.forward.sharding import reading_note, shard_model
from kedge.models.loading import gather, start
from kedge.models.loading import unread as loading_unread
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.load import load_causal
from kedge.models.loading.start import load_base, save_causal
from kedge.models.loading.tiny import make_tiny, tiny_tokenizer
from kedge.models.loading.unread import merged_unread
from kedge.models.reward import reward_files
from kedge.models.reward.ensemble import Ensemble, load_ensemble, lora_members, save_ensemble
from kedge.models.reward.reward_files import build, load, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.roles.build import plain
from kedge.models.settings import LoraSettings, MeanOfMembers
from kedge.runs.state import load_state, save_state, share_of
from kedge.runtime.processes import make_mesh

LORA = LoraSettings(rank=2)


def write_models(home: Path) -> None:
    """Families, files and adapters of all kinds."""
    tiny = make_tiny(home / "tiny", hidden=32, layers=2)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends: dict[str, Any] = {"pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258, "vocab_size": 259}
    torch.manual_seed(4)
    qwen = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, tie_word_embeddings=False, **sizes, **ends))
    _write(qwen, home / "several files", max_shard_size="20KB")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ends))
    _write(gpt2, home / "gpt2")
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **ends))
    _write(neox, home / "other name")
    experts = MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **sizes, **ends))
    _write(experts, home / "experts")
    _write(load_causal(tiny), home / "stored twice")
    weights = load_file(home / "stored twice" / "model.safetensors")
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    save_file(twice, home / "stored twice" / "model.safetensors", metadata={"format": "pt"})
    adapted = with_lora(load_base(str(tiny), dtype="float32"), LORA, name="policy", seed=5)
    save_causal(moved(adapted), tiny_tokenizer(), home / "adapted" / "model")
    save(build(tiny, seed=3, dtype="float32"), home / "judge")
    members = [moved_member(member) for member in lora_members(build(tiny, seed=5), LORA, count=2, seed=8)]
    save_ensemble(Ensemble(members=tuple(members), combine=MeanOfMembers()), home / "ensemble")


def _write(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)


@torch.no_grad()
def moved(model: PreTrainedModel) -> PreTrainedModel:
    """As after some training: a new adapter changes nothing."""
    for name, parameter in model.named_parameters():
        if "lora_B." in name:
            parameter.copy_(0.3 * torch.sin(torch.arange(parameter.numel()) + len(name)).view_as(parameter))
    return model


def moved_member(member: RewardModel) -> RewardModel:
    moved(member.model)
    return member


def _with_adapter(home: Path, dtype: Any, unread: bool) -> PreTrainedModel:
    base = load_base(str(home / "tiny"), dtype=dtype, unread=unread)
    return moved(with_lora(base, LORA, name="policy", seed=3))


def _on_adapter(home: Path, unread: bool) -> PreTrainedModel:
    """A base that is itself a base with an adapter, for it would be rounded."""
    base = load_base(str(home / "adapted" / "model"), dtype="bfloat16", unread=unread)
    return moved(with_lora(base, LORA, name="policy", seed=3))


def _second_member(home: Path, unread: bool) -> PreTrainedModel:
    member = load_ensemble(home / "ensemble", dtype="float32", unread=unread).members[1]
    return merged_unread(member.model, member.adapter) if unread else plain(member)


def _refuse(*_: Any) -> str:
    return "of a test"


def _sent(home: Path, unread: bool, open_model: Callable[[Path, bool], PreTrainedModel] | None = None) -> Any:
    """As of a model whose files cannot be read part by part."""
    module: Any = loading_unread
    before, module._changed_on_reading = module._changed_on_reading, _refuse
    try:
        return (open_model or MODELS["several files"])(home, unread)
    finally:
        module._changed_on_reading = before


Open = Callable[[Path, bool], PreTrainedModel]
MODELS: dict[str, Open] = {
    "tied": lambda home, unread: load_causal(home / "tiny", dtype="float32", unread=unread),
    "bfloat16": lambda home, unread: load_causal(home / "tiny", dtype="bfloat16", unread=unread),
    "several files": lambda home, unread: load_causal(home / "several files", dtype="float32", unread=unread),
    "gpt2": lambda home, unread: load_causal(home / "gpt2", dtype="float32", unread=unread),
    "other name": lambda home, unread: load_causal(home / "other name", dtype="float32", unread=unread),
    "experts": lambda home, unread: load_causal(home / "experts", dtype="float32", unread=unread),
    "stored twice": lambda home, unread: load_causal(home / "stored twice", dtype="float32", unread=unread),
    "sent": lambda home, unread: _sent(home, unread),
    "adapter": lambda home, unread: _with_adapter(home, "float32", unread),
    "adapter, bfloat16": lambda home, unread: _with_adapter(home, "bfloat16", unread),
    "adapter on an adapter": _on_adapter,
    "new reward model": lambda home, unread: build(home / "tiny", seed=2, dtype="float32", unread=unread).model,
    "reward model": lambda home, unread: load(home / "judge", dtype="bfloat16", unread=unread).model,
    "ensemble": lambda home, unread: load_ensemble(home / "ensemble", dtype="float32", unread=unread).members[0].model,
    "merged member": _second_member,
    "sent member": lambda home, unread: _sent(home, unread, _second_member),
}
SENT = {"sent", "sent member", "experts"}
"""Those of which process 0 has to send the others their parts."""

SAVED = [name for name in MODELS if name not in ("sent", "merged member", "sent member")]


def open_model(world: World, home: Path, name: str) -> PreTrainedModel:
    """The model as this world holds it; frozen, so that all weights have the type that they are read in."""
    is_cut = world.size > 1
    model = MODELS[name](home, is_cut).requires_grad_(False)
    if is_cut:
        heads = [parameter for key, parameter in model.named_parameters() if key.startswith("score.")]
        shard_model(model, make_mesh(1, world.size, on_gpu=False), whole=heads)
    return model


def read_model(world: World, home: Path, name: str) -> dict[str, Any]:
    """All that a model is made of."""
    torch.manual_seed(11)
    model = open_model(world, home, name)
    return {
        "weights": {key: gathered(weight).detach().float() for key, weight in model.named_parameters()},
        "tied": len({id(weight) for weight in model.state_dict(keep_vars=True).values()}),
        "buffers": dict(model.named_buffers()),
        "hash": module_hash(model, with_adapters=True),
        "base": module_hash(model),
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict() if model.can_generate() else {},
        "source": model.name_or_path,
        "note": reading_note(model),
        "drawn": torch.rand(3),  # reading draws no random numbers
    }


def trained(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights after some training, of adapters if there are some; they are cut where the model's are."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or not has_adapters(model):
            whole = gathered(parameter).detach().float()
            learnt = whole + 0.01 * torch.sin(torch.arange(whole.numel()) * 0.7 + len(name)).view_as(whole)
            weights[name] = as_part(part_of(learnt, parameter).clone(), parameter)
    return weights


def save_model(world: World, home: Path, name: str, folder: Path, dtype: Any) -> None:
    """Save what was learnt, in small files."""
    model = open_model(world, home, name)
    weights = trained(model)
    with small_files():
        if not hasattr(model, "score"):
            save_causal(model, tiny_tokenizer(), folder / "model", weights=weights, dtype=dtype, world=world)
            return
        members = load_ensemble(home / "ensemble").members if name == "ensemble" else ()
        facts = build(home / "tiny", seed=0).facts
        tokenizer = PreTrainedTokenizerFast.from_pretrained(home / "judge")
        adapters = [member.adapter for member in members] or [None]
        rewards = [RewardModel(model=model, tokenizer=tokenizer, facts=facts, adapter=key) for key in adapters]
        save(rewards[-1], folder / "model", weights=weights, dtype=dtype, world=world)
        ensemble = Ensemble(members=tuple(rewards), combine=MeanOfMembers())
        save_ensemble(ensemble, folder / "ensemble", weights=[weights] * len(rewards), dtype=dtype, world=world)


@contextmanager
def small_files() -> Generator[None]:
    modules: list[Any] = [gather, start, reward_files]
    before = [module.SHARD_SIZE for module in modules]
    try:
        for module in modules:
            module.SHARD_SIZE = "20KB"
        yield
    finally:
        for module, size in zip(modules, before, strict=True):
            module.SHARD_SIZE = size


def write_large(folder: Path) -> None:
    """A model of eight layers in bfloat16: in float32 it is twice as large as its file."""
    config = LlamaConfig(
        vocab_size=259, hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True, pad_token_id=256, bos_token_id=None, eos_token_id=258,
    )  # fmt: skip
    _write(cast(Any, LlamaForCausalLM(config)).to(torch.bfloat16), folder)


def peak_memory(world: World, folder: Path, saved: Path) -> dict[str, float]:
    """The most memory that each act takes beyond what was held before it, as a share of the model's bytes."""
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    mesh = make_mesh(1, world.size, on_gpu=False)
    blank = load_causal(folder, dtype="float32", unread=True)
    whole = sum(parameter.nbytes for parameter in blank.parameters())
    layer = sum(parameter.nbytes for parameter in blank.get_submodule("model.layers.0").parameters())
    facts, opened = {"layer": layer / whole}, list[PreTrainedModel]()

    def read() -> None:
        opened.append(load_causal(folder, dtype="float32", unread=True))
        shard_model(opened[0], mesh, dtype=torch.bfloat16)

    def save_checkpoint() -> None:
        share = share_of({"weights": state}, world.rank)
        assert share is not None
        share(saved)
        world.same(None)
        if world.rank == 0:
            save_state(saved, {"weights": state})
        world.same(None)

    saved.mkdir(exist_ok=True)
    facts["read"] = _peak(read) / whole
    state = {name: parameter.detach() for name, parameter in opened[0].named_parameters()}
    facts["save"] = _peak(lambda: save_causal(opened[0], tiny_tokenizer(), saved / "model", world=world)) / whole
    facts["checkpoint"] = _peak(save_checkpoint) / whole
    loaded: list[Any] = []
    facts["resume"] = _peak(lambda: loaded.append(load_state(saved, like={"weights": state}))) / whole
    facts["hash"] = _peak(lambda: module_hash(opened[0])) / whole
    assert all(torch.equal(local(loaded[0]["weights"][name]), local(weight)) for name, weight in state.items())
    return facts


def _peak(act: Callable[[], object]) -> float:
    """How much more anonymous memory than before this process has at most while it acts."""
    before, highest, is_over = _anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            highest[0] = max(highest[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    is_over.set()
    watcher.join()
    return max(highest[0], _anonymous()) - before


def _anonymous() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return float(line.split()[1]) * 1024


def fail_to_save(world: World, home: Path, folder: Path) -> str:
    """Process 0 may not write here: what all of them say."""
    model = open_model(world, home, "tied")
    try:
        save_causal(model, tiny_tokenizer(), folder, world=world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"
