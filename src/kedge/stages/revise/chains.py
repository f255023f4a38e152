"""From an answer to its last revision: every critique and every revision between, for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kedge.data.examples import Prompt
from kedge.feedback.constitution import Principle, draw
from kedge.stages.revise.requests import critique_request, read_revision, revision_request
from kedge.stages.revise.writers import Request, Unwritten, Writer, asking

PIECE = 128
"""Prompts whose chains are written together: what a kill can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One critique by one principle, and what the answer became. An empty revision leaves it as it was."""

    principle: Principle
    before: str
    critique: str
    revision: str

    @property
    def after(self) -> str:
        return self.revision or self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """An answer and its steps so far. `broken` says why it could not be finished."""

    place: int
    prompt: Prompt
    first: str
    steps: tuple[Step, ...] = ()
    broken: Unwritten | None = None

    @property
    def last(self) -> str:
        return self.steps[-1].after if self.steps else self.first


def revised(
    prompts: Sequence[Prompt],
    principles: Sequence[Principle],
    *,
    answerer: Writer,
    critic: Writer,
    times: int,
    seed: int,
    start: int = 0,
) -> list[Chain]:
    """The chains of these prompts, the first of which has place `start`."""
    requests = [Request(place=start + at, messages=prompt.prompt) for at, prompt in enumerate(prompts)]
    answers = answerer.write(requests, "answer")
    chains = [
        Chain(
            place=start + at,
            prompt=prompt,
            first=answer.strip() if isinstance(answer, str) else "",
            broken=answer if isinstance(answer, Unwritten) else None,
        )
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    for number in range(times):
        chains = _improved(chains, principles, critic, number=number, seed=seed)
    return chains


def _improved(
    chains: Sequence[Chain], principles: Sequence[Principle], critic: Writer, *, number: int, seed: int
) -> list[Chain]:
    """Each chain with one step more, but for those that are broken."""
    drawn = {chain.place: draw(principles, seed=seed, key=f"{chain.place} {number}") for chain in chains}
    going = [chain for chain in chains if chain.broken is None]
    asked = [
        asking(chain.place, critique_request(chain.prompt.prompt, chain.last, drawn[chain.place], seed=seed))
        for chain in going
    ]
    replies = critic.write(asked, f"critique {number + 1}")
    critiques = {chain.place: reply for chain, reply in zip(going, replies, strict=True)}
    criticised = [chain for chain in going if isinstance(critiques[chain.place], str)]
    requests, fences = list[Request](), list[str]()
    for chain in criticised:
        critique = str(critiques[chain.place]).strip()
        text, fence = revision_request(chain.prompt.prompt, chain.last, critique, drawn[chain.place], seed=seed)
        requests.append(asking(chain.place, text))
        fences.append(fence)
    texts = critic.write(requests, f"revision {number + 1}")
    revisions = {
        chain.place: read_revision(text, fence) if isinstance(text, str) else text
        for chain, text, fence in zip(criticised, texts, fences, strict=True)
    }
    return [_longer(chain, critiques, revisions, drawn[chain.place]) for chain in chains]


def _longer(
    chain: Chain,
    critiques: dict[int, str | Unwritten],
    revisions: dict[int, str | Unwritten],
    principle: Principle,
) -> Chain:
    if chain.broken is not None:
        return chain
    critique = critiques[chain.place]
    if isinstance(critique, Unwritten):
        return replace(chain, broken=critique)
    revision = revisions[chain.place]
    if isinstance(revision, Unwritten):
        return replace(chain, broken=revision)
    step = Step(principle=principle, before=chain.last, critique=critique.strip(), revision=revision)
    return replace(chain, steps=(*chain.steps, step))
