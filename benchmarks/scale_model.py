"""What a step takes on 8 to 1,024 GPUs by the model of kedge.plan.scale, and how far it is from measured steps.

    python benchmarks/scale_model.py                          prints the tables of docs/scale-model.md
    python benchmarks/scale_model.py --write                  puts them into the page, between its markers
    python benchmarks/scale_model.py --flops 6e14 --network 25e9 …   with rates of your own

Rates are those that were measured on one H200 (docs/speed.md) and those of data sheets. The shares of them that Kedge
reaches come from one measured update, and are tested on two others. For published steps three numbers are fitted, once
for all, on six rows of one table: two of the software (the share of the memory's rate while sampling, seconds of a
decoding pass that no rate explains) and one that we could not find (the answers of a step). All other rows are tests.
No row has a parameter of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

from kedge.plan.scale import Layout, Machine, Shape, Shares, Step, Work, step

PAGE = Path(__file__).parents[1] / "docs/scale-model.md"
BEGIN, END = "<!-- tables: benchmarks/scale_model.py --write -->", "<!-- end of tables -->"

# Rates. An H200 does 798 of its 989 TFLOP/s in matrices and copies at 4.22 of its 4.8 TB/s (docs/speed.md); other cards
# are their data sheet times the same two shares. NVLink and network are of data sheets: 900 GB/s both ways (A100: 600),
# 400 Gb/s a GPU.
MATRIX_SHARE, COPY_SHARE = 798 / 989, 4.22 / 4.8
H200 = Machine(flops=798e12, bandwidth=4.22e12, memory=141e9, nvlink=450e9, network=50e9)
H100 = replace(H200, bandwidth=3.35e12 * COPY_SHARE, memory=80e9)
A100 = Machine(flops=312e12 * MATRIX_SHARE, bandwidth=2.04e12 * COPY_SHARE, memory=80e9, nvlink=300e9, network=25e9)
KEDGE = Shares(learn=0.33 / 0.91, read=0.20 / 0.55, decode=0.10 / 0.32)
"""Floor over measured seconds of one PPO update, four 0.5B models on an H200 (docs/speed.md): learn, judge, sample."""
USABLE = 0.9
"""Of a GPU's memory, what may be planned with."""

SHAPES = {
    "0.5B": Shape(parameters=0.494e9, layers=24, width=896, kv_width=128),
    "1.5B": Shape(parameters=1.54e9, layers=28, width=1536, kv_width=256),
    "7B": Shape(parameters=7.62e9, layers=28, width=3584, kv_width=512),
    "8B": Shape(parameters=8.03e9, layers=32, width=4096, kv_width=1024),
    "14B": Shape(parameters=14.8e9, layers=48, width=5120, kv_width=1024),
    "70B": Shape(parameters=70.6e9, layers=80, width=8192, kv_width=1024),
    "OPT 1.3B": Shape(parameters=1.32e9, layers=24, width=2048, kv_width=2048),
    "OPT 350M": Shape(parameters=0.331e9, layers=24, width=1024, kv_width=1024),
}
"""Of the models' own configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured step, and what it was made of as far as that is known."""

    who: str
    what: str
    seconds: float
    work: Work
    machine: Machine
    layout: Layout
    is_fitted: bool = False
    answers_known: bool = True

    def computed(self, constants: Constants) -> float:
        work = self.work if self.answers_known else replace(self.work, answers=constants.answers)
        return step(work, self.machine, constants.shares, self.layout).seconds

    def error(self, constants: Constants) -> float:
        return self.computed(constants) / self.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What all rows of others' software have in common."""

    shares: Shares
    answers: int
    """Answers of full length in one step of the DAPO table."""


OURS = Constants(shares=KEDGE, answers=0)
LENGTHS = (1024, 2048, 4096, 8192)
_DAPO = {
    "OpenRLHF": {
        "1.5B": (14.9, 26.5, 61.6, 113.0),
        "7B": (16.0, 30.3, 90.3, 226.4),
        "14B": (25.5, 51.0, 136.3, 328.6),
    },
    "verl 0.4.0": {
        "1.5B": (16.2, 33.1, 65.5, 134.8),
        "7B": (17.3, 47.3, 101.3, 232.4),
        "14B": (28.5, 74.3, 202.8, 511.1),
    },
}
"""Seconds a step at answers of 1K, 2K, 4K and 8K tokens, 8 H200, DAPO (OpenRLHF's report, arXiv 2405.11143)."""


def own_rows() -> Iterator[Row]:
    """PPO updates that we measured on one H200 (docs/speed.md), four models of a size, 128 + 256 tokens a row."""
    measured = (("0.5B", 128, 27_671, True), ("0.5B", 512, 31_999, False), ("1.5B", 128, 12_531, False))
    for size, answers, rate, is_fitted in measured:
        shape = SHAPES[size]
        work = Work(
            policy=shape,
            critic=shape,
            frozen=(shape, shape),
            answers=answers,
            prompt_tokens=128,
            answer_tokens=256,
            updates=4,
            recompute=False,
        )
        what = f"PPO {size}, {answers} answers, 1 H200"
        seconds = work.tokens / rate
        layout = Layout(gpus=1)
        yield Row(who="Kedge", what=what, seconds=seconds, work=work, machine=H200, layout=layout, is_fitted=is_fitted)


def dapo_rows() -> Iterator[Row]:
    for who, by_size in _DAPO.items():
        for size, seconds in by_size.items():
            for length, published in zip(LENGTHS, seconds, strict=True):
                yield Row(
                    who=who,
                    what=f"DAPO {size}, {length // 1024}K answers, 8×H200",
                    seconds=published,
                    work=Work(policy=SHAPES[size], answers=1, prompt_tokens=256, answer_tokens=length),
                    machine=H200,
                    layout=Layout(gpus=8, weights="shard"),
                    is_fitted=who == "OpenRLHF" and length in (LENGTHS[0], LENGTHS[-1]),
                    answers_known=False,
                )


def other_rows() -> Iterator[Row]:
    for nodes, critics, seconds in ((8, 4, 366.7), (64, 32, 56.9)):
        # The machines of critic and reward model work at the same time as the actor's, and are not the slower ones.
        yield Row(
            who="NeMo-Aligner",
            what=f"PPO 70B, {nodes}+{critics} nodes of 8×H100",
            seconds=seconds,
            work=Work(
                policy=SHAPES["70B"], frozen=(SHAPES["70B"],), answers=1024, prompt_tokens=256, answer_tokens=1024
            ),
            machine=H100,
            layout=Layout(gpus=8 * nodes, weights="shard", tensor_parallel=8),
        )
    actor, critic = SHAPES["OPT 1.3B"], SHAPES["OPT 350M"]
    chat = Work(
        policy=actor,
        critic=critic,
        frozen=(actor, critic),
        answers=1024,
        prompt_tokens=256,
        answer_tokens=256,
        recompute=False,
    )
    yield Row(
        who="DeepSpeed-Chat",
        what="PPO 1.3B + 350M, 1 A100-80G",
        seconds=chat.tokens / 3200,
        work=chat,
        machine=A100,
        layout=Layout(gpus=1),
    )


def published_rows() -> list[Row]:
    return [*dapo_rows(), *other_rows()]


def fitted(rows: Sequence[Row]) -> Constants:
    """The three numbers with the smallest squared log error on the rows to fit. The share of compute is Kedge's: it
    could not be told apart from the number of answers."""
    choices = [
        Constants(shares=replace(KEDGE, decode=decode / 10, token_s=milliseconds / 1000), answers=answers)
        for decode in range(3, 10)
        for milliseconds in range(16)
        for answers in range(16, 513, 16)
    ]
    chosen = [row for row in rows if row.is_fitted]
    return min(choices, key=lambda constants: sum(log(row.computed(constants) / row.seconds) ** 2 for row in chosen))


def typical_factor(rows: Sequence[Row], constants: Constants) -> float:
    """The geometric mean of how many times too long or too short a step is computed."""
    return exp(sum(abs(log(row.computed(constants) / row.seconds)) for row in rows) / len(rows))


def measured_table() -> Iterator[str]:
    own, rows = list(own_rows()), published_rows()
    constants = fitted(rows)
    yield "| measured step | seconds | computed | error | |"
    yield "|---|---|---|---|---|"
    for row in (*own, *rows):
        by = OURS if row.who == "Kedge" else constants
        mark = "fitted on" if row.is_fitted else "test"
        yield (
            f"| {row.who}: {row.what} | {row.seconds:.1f} | {row.computed(by):.1f} | {100 * row.error(by):+.0f} % "
            f"| {mark} |"
        )
    yield ""
    tests = [row for row in rows if not row.is_fitted and not row.answers_known]
    others = [row for row in rows if row.answers_known]
    shares = constants.shares
    yield (
        f"- Kedge's shares: learn {KEDGE.learn:.2f}, read {KEDGE.read:.2f}, decode {KEDGE.decode:.2f}; on its two test "
        f"rows off by a factor of {typical_factor(own[1:], OURS):.2f} on the (geometric) mean."
    )
    yield (
        f"- Fitted for the others: decode {shares.decode:.1f}, {1000 * shares.token_s:.0f} ms a decoding pass, and "
        f"{constants.answers} answers of full length a step of DAPO; learn and read as Kedge's."
    )
    yield (
        f"- Off by a factor of {typical_factor(tests, constants):.2f} on the mean of the {len(tests)} other rows of "
        f"that table, and of {typical_factor(others, constants):.2f} on that of {len(others)} steps of other tables."
    )
    first, second = (row for row in rows if row.who == "NeMo-Aligner")
    yield (
        f"- Eight times the nodes made NeMo-Aligner's step {first.seconds / second.seconds:.1f} times as short; "
        f"computed, {first.computed(constants) / second.computed(constants):.1f} times."
    )


COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALED = {"1.5B": 1, "8B": 1, "70B": 8}
"""Sizes, and the GPUs of one engine that samples."""


def ppo(size: str) -> Work:
    """PPO with four models of one size: 4,096 answers of 1,024 tokens to prompts of 512, four updates."""
    shape = SHAPES[size]
    return Work(
        policy=shape,
        critic=shape,
        frozen=(shape, shape),
        answers=4096,
        prompt_tokens=512,
        answer_tokens=1024,
        updates=4,
        row_tokens_at_once=8192,
    )


def layouts(gpus: int, tensor_parallel: int) -> Iterator[tuple[str, Layout]]:
    plain = Layout(gpus=gpus, tensor_parallel=tensor_parallel)
    yield "shared, replicate", plain
    yield "shared, shard", replace(plain, weights="shard")
    if gpus > H200.gpus:
        yield "shared, hsdp", replace(plain, weights="hsdp")
    if gpus // 2 >= tensor_parallel:
        apart = replace(plain, engines="separate", samplers=gpus // 2, weights="shard")
        yield "half sample, shard, lag 0", apart
        yield "half sample, shard, lag 1", replace(apart, lag=1)


def scaled_table(size: str, machine: Machine, shares: Shares) -> Iterator[str]:
    work, too_large = ppo(size), dict[str, list[str]]()
    yield "| GPUs | layout | generate | judge | learn | sync | step, s | tokens/s | idle | GiB a GPU |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for gpus in COUNTS:
        for name, layout in layouts(gpus, SCALED[size]):
            taken = step(work, machine, shares, layout)
            if taken.memory > USABLE * machine.memory:
                too_large.setdefault(name, []).append(f"{gpus:,} ({taken.memory / 2**30:,.0f} GiB)")
            else:
                yield _scaled_row(gpus, name, taken, work)
    yield ""
    for name, counts in too_large.items():
        yield f"- {name}: does not fit on {', '.join(counts)}"


def _scaled_row(gpus: int, name: str, taken: Step, work: Work) -> str:
    phases = " | ".join(f"{seconds:.1f}" for seconds in (taken.generate, taken.judge, taken.learn))
    return (
        f"| {gpus:,} | {name} | {phases} | {taken.sync:.2f} | {taken.seconds:.1f} | {work.tokens / taken.seconds:,.0f} "
        f"| {100 * taken.idle:.0f} % | {taken.memory / 2**30:.0f} |"
    )


def tables(machine: Machine, shares: Shares) -> str:
    parts = ["## Beside measured steps", *measured_table()]
    for size in SCALED:
        title = f"## PPO with four {size} models, 4,096 × (512 + 1,024) tokens a step"
        parts += ["", title, *scaled_table(size, machine, shares)]
    return "\n".join(parts)


def written(page: str, text: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale-model.md")
    for name in ("flops", "bandwidth", "memory", "nvlink", "network"):
        parser.add_argument(f"--{name}", type=float, default=getattr(H200, name))
    for name in ("learn", "read", "decode", "links"):
        parser.add_argument(f"--{name}", type=float, default=getattr(KEDGE, name))
    options = vars(parser.parse_args())
    machine = Machine(**{name: options[name] for name in ("flops", "bandwidth", "memory", "nvlink", "network")})
    shares = Shares(**{name: options[name] for name in ("learn", "read", "decode", "links")})
    text = tables(machine, shares)
    if options["write"]:
        PAGE.write_text(written(PAGE.read_text("utf-8"), text), "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
