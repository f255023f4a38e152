"""Chat templates for other programs: without the marks that only training reads, and for Ollama as Go templates.

A Go template is written only for families whose text is known: the model's own template must give exactly that text for
conversations with and without a system message, of one turn and of several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.core.errors import ModelError
from kedge.data.examples import Message, Messages
from kedge.data.template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_SLOT = "\ue000"


def without_marks(template: str) -> str:
    """The same text without `{% generation %}`, which few programs know; spaces are trimmed as before.

    >>> without_marks("{%- generation %}{{ x }}{% endgeneration -%}")
    '{%- if true %}{{ x }}{% endif -%}'
    """
    return _MARK.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", template)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A chat format: how one message is written, and how an answer begins."""

    name: str
    message: Callable[[str, str, str], str]
    """From role, content and the tokenizer's end token to text."""
    opening: str
    """What comes before an answer."""
    go: Callable[[str], str]
    """The same as a Go template, from the end token."""
    stop: Callable[[str], tuple[str, ...]]

    def text(self, messages: Messages, eos: str) -> str:
        return "".join(self.message(message.role, message.content, eos) for message in messages) + self.opening


@dataclass(frozen=True, slots=True, kw_only=True)
class GoTemplate:
    family: str
    text: str
    system: str
    """The system message of conversations that bring none; empty where there is none."""
    stop: tuple[str, ...]


def _plain_message(role: str, content: str, eos: str) -> str:
    return f"{role.capitalize()}:\n{content}{eos if role == 'assistant' else ''}\n\n"


def _plain_go(eos: str) -> str:
    ends = f'{{{{ if eq .Role "assistant" }}}}{eos}{{{{ end }}}}'
    role = '{{ if eq .Role "system" }}System{{ else if eq .Role "user" }}User{{ else }}Assistant{{ end }}'
    return f"{{{{ range .Messages }}}}{role}:\n{{{{ .Content }}}}{ends}\n\n{{{{ end }}}}Assistant:\n"


FAMILIES = (
    Family(
        name="ChatML",
        message=lambda role, content, _: f"<|im_start|>{role}\n{content}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
        go=lambda _: (
            "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
        ),
        stop=lambda _: ("<|im_end|>",),
    ),
    Family(
        name="Llama 3",
        message=lambda role, content, _: f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        go=lambda _: (
            "{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        stop=lambda _: ("<|eot_id|>",),
    ),
    Family(
        name="plain",
        message=_plain_message,
        opening="Assistant:\n",
        go=_plain_go,
        stop=lambda eos: (eos,),
    ),
)


def go_template(tokenizer: PreTrainedTokenizerBase, *, adds_bos: bool) -> GoTemplate:
    """The model's chat template for Ollama. `adds_bos`: the begin token comes from the tokenizer's own settings."""
    if not tokenizer.chat_template:
        raise ModelError(
            "it has no chat template, and a Modelfile is one; export to gguf, which needs none, or train it on "
            "conversations first (chat_template in a recipe)"
        )
    bos, eos = str(tokenizer.bos_token or ""), str(tokenizer.eos_token or "")
    for family in FAMILIES:
        # The begin token may be a part of the family's own text (SmolLM2's is ChatML's first), or stand before it.
        for begin in (bos,) if adds_bos else dict.fromkeys(("", bos)):
            system = _system_of(tokenizer, family, begin, eos)
            if system is not None and '"""' not in system:
                lead = "" if adds_bos else begin
                return GoTemplate(family=family.name, text=lead + family.go(eos), system=system, stop=family.stop(eos))
    known = ", ".join(family.name for family in FAMILIES)
    raise ModelError(
        f"its chat template is none of those that are known as Go templates ({known}), and a guess would feed the "
        "model texts that it was not trained on; export to gguf, whose file has the template itself (llama.cpp reads "
        "it), and write the Modelfile by hand"
    )


_USER, _ANSWER, _AGAIN = Message("user", "Ada?"), Message("assistant", "Yes, it is."), Message("user", "Why\nso?")
_PROBES: Sequence[Messages] = ((_USER,), (_USER, _ANSWER, _AGAIN))


def _system_of(tokenizer: PreTrainedTokenizerBase, family: Family, begin: str, eos: str) -> str | None:
    """The default system message of a template of this family; None where the template is of another."""
    given = (Message("system", "Be brief."),)
    if any(_rendered(tokenizer, given + probe, begin) != family.text(given + probe, eos) for probe in _PROBES):
        return None
    texts = [_rendered(tokenizer, probe, begin) for probe in _PROBES]
    if texts == [family.text(probe, eos) for probe in _PROBES]:
        return ""
    before, after = family.text((Message("system", _SLOT), *_PROBES[0]), eos).split(_SLOT)
    if not (texts[0].startswith(before) and texts[0].endswith(after)):
        return None
    system = texts[0][len(before) : len(texts[0]) - len(after)]
    default = (Message("system", system),)
    return system if texts == [family.text(default + probe, eos) for probe in _PROBES] else None


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, begin: str) -> str:
    """A conversation after the begin token; of a template without that, or without system messages, no text at all."""
    try:
        text = render(tokenizer, messages, add_generation_prompt=True)
    except ModelError:
        return _SLOT
    return text.removeprefix(begin) if text.startswith(begin) else _SLOT


def modelfile(template: GoTemplate, *, file: str, window: int) -> str:
    """What `ollama create NAME -f Modelfile` reads."""
    system = f'SYSTEM """{template.system}"""\n' if template.system else ""
    stops = "".join(f'PARAMETER stop "{stop}"\n' for stop in template.stop)
    return f'FROM ./{file}\nTEMPLATE """{template.text}"""\n{system}{stops}PARAMETER num_ctx {window}\n'
