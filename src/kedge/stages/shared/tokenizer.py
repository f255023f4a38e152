"""The tokenizer of a recipe's model, speaking the chat template that the recipe asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_for(model: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """`chat_template` is a built-in name (`chatml`, `plain`), a Jinja file, or None for the model's own."""
    from kedge.data.template import apply_template
    from kedge.data.tokenizer import load_tokenizer
    from kedge.models.loading.resolve import resolve

    tokenizer = load_tokenizer(resolve(model))
    return tokenizer if chat_template is None else apply_template(tokenizer, chat_template)
