"""`kedge export`: folders that other programs load, compared with their source; whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.commands.export import templates
from kedge.core.errors import ModelError
from kedge.models.loading import gguf_write
from kedge.models.loading.gguf import open_gguf, read_causal
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny, tiny_tokenizer
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe

Kedge = Callable[..., Any]
SECRET = "hf_averysecrettoken"
ROW = torch.tensor([[72, 105, 33, 10, 72, 111]])


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    make_tiny(tmp_path / "model", seed=5, hidden=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stages: SFT of an adapter, of one that is saved merged in bfloat16, and of all weights."""
    home = tmp_path_factory.mktemp("run")
    base = sharpened(make_tiny(home / "base", seed=5, hidden=32))
    rows = [{"prompt": f"Say {word}", "completion": f"{word}."} for word in ("yes", "no", "maybe", "so")]
    (home / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"kind": "sft", "data": "demos.jsonl", "epochs": 2, "batch": 2, "max_length": 64, "optimiser": {"lr": 0.01}}
    lora = {**sft, "lora": {"rank": 4}}
    rounded = {**lora, "memory": {"save_dtype": "bfloat16"}}
    stages = {"first": lora, "rounded": rounded, "last": {**sft, "from": "first"}}
    recipe = {"kedge": 1, "name": "talk", "model": str(base), "device": "cpu", "stages": stages}
    (home / "talk.yaml").write_text(json.dumps(recipe))
    run_recipe(load_recipe(home / "talk.yaml"), home / "runs", is_resumed=False, say=lambda line: None)
    return home / "runs/talk"


def sharpened(folder: Path) -> Path:
    """The model of a folder with weights as large as those of trained ones: what is rounded wrongly shows."""
    factors = {"self_attn": 8, "embed_tokens": 4}
    weights = load_file(folder / "model.safetensors")
    sharper = {
        name: weight * next((factor for part, factor in factors.items() if part in name), 1)
        for name, weight in weights.items()
    }
    save_file(sharper, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(ROW).logits


def test_a_folder_for_transformers(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("export", "./model", "--to", "hf", "--output", "out", "--dtype", "bfloat16")
    assert (done.code, done.err) == (0, "")
    assert "out: hf, bfloat16" in done.out
    assert "mean |Δ log-prob| 0.0" in done.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.allclose(logits(model.float()), logits(load_causal(tmp_path / "model")), atol=0.02)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    record = json.loads((tmp_path / "out/export.json").read_text())
    assert (record["to"], record["weights"], record["fidelity"]["same_top"]) == ("hf", "bfloat16", 1.0)
    assert "beside its source: mean |Δ log-prob|" in (tmp_path / "out/README.md").read_text()


def test_a_folder_for_vllm(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("export", "./model", "--to", "vllm")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "vllm serve model-vllm --served-model-name model --max-model-len 1024"
    folder = tmp_path / "model-vllm"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [258]
    template = (folder / "chat_template.jinja").read_text()
    assert "generation %}" not in template.replace("add_generation_prompt %}", "")
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
    assert theirs == tiny_tokenizer().apply_chat_template(talk, tokenize=False)


def test_positions_are_not_rounded_with_the_weights(kedge: Kedge, tmp_path: Path) -> None:
    sharpened(tmp_path / "model")
    done = kedge("export", "./model", "--to", "vllm", "-o", "out")
    assert (done.code, done.err) == (0, "")
    source = load_causal(tmp_path / "model")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(logits(load_causal(tmp_path / "out", dtype="float32")), logits(source))


def test_a_gguf_file_and_a_modelfile(kedge: Kedge, tmp_path: Path) -> None:
    done = kedge("export", "./model", "--to", "ollama", "--quantise", "q8_0", "--json")
    told = json.loads(done.out)
    assert told["kind"] == "q8_0"
    assert 0 < told["fidelity"]["mean_change"] < 0.05
    back = read_causal(open_gguf(tmp_path / "model-ollama/model-q8_0.gguf"))
    assert torch.allclose(logits(back), logits(load_causal(tmp_path / "model")), atol=0.1)
    lines = (tmp_path / "model-ollama/Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./model-q8_0.gguf"
    assert lines[1] == 'TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}'
    assert lines[-2:] == ['PARAMETER stop "<|im_end|>"', "PARAMETER num_ctx 1024"]


def test_a_run_is_its_last_policy_and_a_stage_is_its_own(kedge: Kedge, run: Path, tmp_path: Path) -> None:
    assert kedge("export", str(run), "--to", "hf", "-o", "last").code == 0
    assert kedge("export", str(run / "first"), "--to", "gguf", "-o", "first").code == 0
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert torch.equal(logits(last), logits(load_causal(run / "last/model")))
    assert (tmp_path / "first/talk-first-f16.gguf").is_file()
    card = (tmp_path / "last/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# talk / last" in card
    assert "## How it was exported" in card
    assert str(tmp_path) not in card
    assert str(run) not in card


def test_an_adapter_for_peft(kedge: Kedge, run: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    done = kedge("export", str(run / "first"), "--to", "adapter", "-o", "adapter")
    assert done.code == 0, done.err
    base = AutoModelForCausalLM.from_pretrained(run.parents[1] / "base")
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert torch.allclose(adapted, logits(load_causal(run / "first/model")), atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    assert "library_name: peft" in (tmp_path / "adapter/README.md").read_text()


def test_an_adapter_whose_merged_model_was_rounded(kedge: Kedge, run: Path) -> None:
    """The adapter is compared with the merged model as its stage rounded it; how far that is from it is told."""
    done = kedge("export", str(run / "rounded"), "--to", "adapter", "-o", "adapter", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["fidelity"]["mean_change"] > 1e-3


def test_where_all_weights_were_trained_there_is_no_adapter(kedge: Kedge, run: Path) -> None:
    done = kedge("export", str(run / "last"), "--to", "adapter")
    assert done.code == 2
    assert "no adapter here" in done.err
    assert "--to hf" in done.err


def test_a_file_that_is_not_the_model_does_not_stay(
    kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight in another order, or a number of its shape that is wrong, is found in what was written."""
    sharpened(tmp_path / "model")
    real = gguf_write.rope_order
    monkeypatch.setattr(gguf_write, "rope_order", lambda weight, heads: weight)
    done = kedge("export", "./model", "--to", "gguf", "-o", "out")
    assert done.code == 1
    assert "4 weight(s), first model.layers.0.self_attn.q_proj.weight, differ beyond what the format" in done.err
    monkeypatch.setattr(gguf_write, "rope_order", real)
    monkeypatch.setattr(
        GGUFWriter, "add_rope_freq_base", lambda self, base: self.add_float32("llama.rope.freq_base", 3.0)
    )
    done = kedge("export", "./model", "--to", "gguf", "-o", "out")
    assert (done.code, "log-probs differ by" in done.err) == (1, True)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["model"]


def test_a_folder_that_may_not_be_written_to_is_said_first(
    kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path / "shut"))
    (tmp_path / "shut").mkdir()
    done = kedge("export", "./model", "--to", "adapter", "-o", "shut/new/out")
    assert done.code == 2
    assert f"{tmp_path / 'shut'} may not be written to" in done.err


def test_nothing_is_overwritten_unless_asked(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("dear diary")
    assert kedge("export", "./model", "--to", "hf", "-o", "out").code == 0
    again = kedge("export", "./model", "--to", "gguf", "-o", "out")
    assert again.code == 2
    assert "--force replaces it" in again.err
    assert kedge("export", "./model", "--to", "gguf", "-o", "out", "--force").code == 0
    assert not (tmp_path / "out/config.json").exists()
    foreign = kedge("export", "./model", "--to", "hf", "-o", "mine", "--force")
    assert foreign.code == 2
    assert "no export of Kedge" in foreign.err
    assert (tmp_path / "mine/notes.txt").read_text() == "dear diary"
    inside = kedge("export", "./model", "--to", "hf", "-o", "model/export")
    assert (inside.code, "inside of the model" in inside.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "hf", "--quantise", "f16"), "--quantise f16: only for --to gguf and ollama"),
        (("--to", "gguf", "--dtype", "float16"), "use --quantise"),
        (("--to", "adapter", "--dtype", "float16"), "an adapter is saved in float32"),
        (("--to", "hf", "--public"), "--public goes with --push"),
        (("--to", "hf", "--push", "me/model"), "no token in HF_TOKEN"),
        (("--to", "hf", "--push", "model"), "expected organisation/name"),
    ],
)
def test_what_does_not_go_together(kedge: Kedge, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = kedge("export", "./model", *arguments)
    assert (done.code, words in done.err) == (2, True), done.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["model"]


class FakeHub:
    """What of the hub's client is used."""

    endpoint = "http://127.0.0.1:9"
    calls: list[tuple[str, Any]]
    public: bool | None = None
    fails = ""

    def __init__(self, token: str) -> None:
        assert token == SECRET

    def whoami(self) -> None:
        if self.fails:
            raise OSError(self.fails)

    def repo_exists(self, repo: str) -> bool:
        return self.public is not None

    def repo_info(self, repo: str) -> Any:
        return type("Info", (), {"private": not self.public})

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", (repo, private)))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.calls.append(("upload", sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    fake = type("Fake", (FakeHub,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return fake


def test_a_push_is_private_and_says_where_it_went(kedge: Kedge, hub: Any, run: Path, tmp_path: Path) -> None:
    done = kedge("export", str(run / "first"), "--to", "adapter", "-o", "out", "--push", "me/talk")
    assert done.code == 0, done.err
    assert "pushed to http://127.0.0.1:9/me/talk" in done.out
    assert hub.calls[0] == ("create", ("me/talk", True))
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(hub.calls[1][1])
    assert SECRET not in done.out + done.err
    sent = "".join(file.read_text() for file in (tmp_path / "out").glob("*.json"))
    assert str(run.parents[1]) not in sent  # no path of this machine leaves it


def test_a_public_repository_is_not_written_to_by_accident(kedge: Kedge, hub: Any, tmp_path: Path) -> None:
    hub.public = True
    refused = kedge("export", "./model", "--to", "hf", "-o", "out", "--push", "me/talk")
    assert (refused.code, "public; give --public" in refused.err) == (2, True)
    assert (hub.calls, (tmp_path / "out").exists()) == ([], False)
    assert kedge("export", "./model", "--to", "hf", "-o", "out", "--push", "me/talk", "--public").code == 0
    assert hub.calls[0] == ("create", ("me/talk", False))


def test_a_hub_that_refuses_is_told_before_anything_is_done_and_without_the_token(
    kedge: Kedge, hub: Any, tmp_path: Path
) -> None:
    hub.fails = f"401 Unauthorized: Bearer {SECRET} is unknown"
    done = kedge("export", "./model", "--to", "hf", "-o", "out", "--push", "me/talk")
    assert done.code == 1
    assert "401 Unauthorized: Bearer … is unknown" in done.err
    assert SECRET not in done.out + done.err
    assert not (tmp_path / "out").exists()


def templated(template: str, **tokens: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens(tokens)
    return tokenizer


SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def test_templates_that_have_a_go_template() -> None:
    smollm = templates.go_template(templated(SMOLLM, bos_token="<|im_start|>"), adds_bos=False)
    assert (smollm.family, smollm.system) == ("ChatML", "Be kind.")
    assert smollm.text.startswith("{{ range .Messages }}<|im_start|>")
    llama = templated(LLAMA3, bos_token="<|pad|>")
    assert templates.go_template(llama, adds_bos=True).text.startswith("{{ range .Messages }}<|start_header_id|>")
    assert templates.go_template(llama, adds_bos=False).text.startswith("<|pad|>{{ range .Messages }}")
    from kedge.data.template import PLAIN

    plain = templates.go_template(templated(PLAIN), adds_bos=False)
    assert (plain.family, plain.stop) == ("plain", ("<|im_end|>",))


@pytest.mark.parametrize(
    "template",
    [
        SMOLLM.replace("'\n' + message", "' \n' + message"),
        SMOLLM.replace("Be kind.", 'Say """."""'),
        "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ],
)
def test_templates_without_one_are_refused(template: str) -> None:
    with pytest.raises(ModelError, match=r"none of those that are known as Go templates \(ChatML, Llama 3, plain\)"):
        templates.go_template(templated(template), adds_bos=False)


def test_a_model_without_a_template_has_no_modelfile() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template, and a Modelfile is one; export to gguf"):
        templates.go_template(tokenizer, adds_bos=False)
