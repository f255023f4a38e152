"""Adapters of other kinds than plain LoRA, as peft writes them: reading one as if it were plain would be another model.

`attempt` gives None where the adapter is refused by the name of what is unusual, else what went wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kedge.core.errors import ModelError
from kedge.models.forward.lora import adapters_of, with_lora
from kedge.models.loading.adapters import load_adapter, save_adapter
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings

CASES: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "AdaLoRA": {"peft_type": "ADALORA"},
    "LoHa": {"peft_type": "LOHA"},
    "IA3": {"peft_type": "IA3"},
    "ranks of single layers": {"rank_pattern": {"q_proj": 8}},
    "scales of single layers": {"alpha_pattern": {"q_proj": 8}},
    "trained biases": {"bias": "lora_only"},
    "biases of B": {"lora_bias": True},
    "some layers only": {"layers_to_transform": [1]},
    "an embedding trained in full": {"modules_to_save": ["embed_tokens"]},
    "trained tokens": {"trainable_token_indices": [3, 4]},
    "a base that PiSSA changed": {"init_lora_weights": "pissa_niter_4"},
    "a base that LoftQ changed": {"init_lora_weights": "loftq"},
    "layers used twice": {"layer_replication": [[0, 2], [1, 2]]},
    "parameters that are no layers": {"target_parameters": ["mlp.experts.up_proj"]},
    "activated LoRA": {"alora_invocation_tokens": [1, 2]},
    "QA-LoRA": {"use_qalora": True},
    "a field that nobody knows yet": {"use_next_years_lora": {"depth": 2}},
}


def attempt(case: str) -> str | None:
    change = CASES[case]
    (name, value), *_ = change.items()
    with TemporaryDirectory() as place:
        folder = Path(place)
        save_adapter(with_lora(tiny_model(), LoraSettings(rank=2), name="policy", seed=0), folder, name="policy")
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        model = tiny_model()
        try:
            load_adapter(model, folder, name="policy")
        except ModelError as error:
            said = value if name == "peft_type" else name
            if said not in str(error) or str(file) not in str(error):
                return f"the message does not name '{said}' and the file: {error}"
            return None if adapters_of(model) is None else "the model was changed before the refusal"
    return f"{name}: {value} was read as plain LoRA"
