"""The command-line options for the size of a case, which several scripts share."""

from __future__ import annotations

import argparse
from typing import Any

from peers.case import Case

MINIBATCHES = 4


def add_sizes(parser: argparse.ArgumentParser, *, updates: int, micro_batch: int) -> None:
    parser.add_argument("--shape", choices=["0.5b", "1.5b", "tiny"], default="0.5b")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--lengths", choices=["equal", "unequal"], default="equal")
    parser.add_argument("--updates", type=int, default=updates, help="the first warms up and does not count")
    parser.add_argument("--micro-batch", type=int, default=micro_batch, help="rows that Kedge learns from at once")
    parser.add_argument("--compile", action="store_true", help="compile the layers of Kedge's roles")


def parse_sizes(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.updates < 2:
        parser.error(f"--updates {args.updates}: the first one warms up, so at least 2 are needed")
    return args


def case_of(args: argparse.Namespace, home: str, **others: Any) -> Case:
    """A case of the sizes in `args`, with one epoch."""
    return Case(
        home=home,
        shape=args.shape,
        rows=args.rows,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        is_unequal=args.lengths == "unequal",
        epochs=1,
        minibatches=MINIBATCHES,
        updates=args.updates,
        micro_batch=args.micro_batch,
        compile=args.compile,
        **others,
    )
