"""Near duplicates and n-grams against brute force, signatures against plain arithmetic, and small vectorised parts."""

from __future__ import annotations

import random
import string
from functools import cache
from hashlib import blake2b
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.stats import wilson
from kedge.data.auditing.minhash import Sketched, Sketches, jaccard, permutations
from kedge.data.auditing.neighbours import clusters, matches
from kedge.data.auditing.ngrams import GRAM, GramCollector, Overlap
from kedge.data.auditing.shingles import TokenRows, WordHashes, fold32
from kedge.data.auditing.text_matching import LiteralFinder, text_key, words


def sketched(texts: list[str], *, seed: int = 0) -> Sketched:
    sketches = Sketches(seed=seed)
    for text in texts:
        sketches.add(text)
    return sketches.sketched()


@cache
def shingle_set(text: str) -> frozenset[str]:
    """The definition, written naively: 5 words, or 5 characters for texts under 20 words."""
    plain = "".join(" " if letter in string.punctuation else letter for letter in text.lower()).split()
    if len(plain) >= 20:
        return frozenset(" ".join(plain[start : start + 5]) for start in range(len(plain) - 4))
    letters = " ".join(text.lower().split())
    return frozenset(letters[start : start + 5] for start in range(max(1, len(letters) - 4)))


def similarity(left: str, right: str) -> float:
    ours, theirs = shingle_set(left), shingle_set(right)
    return len(ours & theirs) / len(ours | theirs)


def family(rng: random.Random, vocabulary: list[str], *, size: int, edits: int) -> list[str]:
    """A text and copies of it with some words replaced at random."""
    original = rng.choices(vocabulary, k=size)
    copies = [original]
    for _ in range(3):
        copy = list(original)
        for place in rng.sample(range(size), k=edits):
            copy[place] = rng.choice(vocabulary)
        copies.append(copy)
    return [" ".join(copy) for copy in copies]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    rng = random.Random(11)
    vocabulary = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(3000)]
    texts = [
        text
        for size in (8, 15, 40, 120, 200)
        for edits in (0, 1, 2, 4)
        for _ in range(6)
        for text in family(rng, vocabulary, size=size, edits=edits)
    ]
    return rng.sample(texts, len(texts))


def test_clusters_agree_with_brute_force(corpus: list[str]) -> None:
    near = {pair for pair in combinations(range(len(corpus)), 2) if similarity(corpus[pair[0]], corpus[pair[1]]) >= 0.8}
    groups = list(range(len(corpus)))
    for first, second in near:
        groups = [groups[first] if group == groups[second] else group for group in groups]
    labels = clusters(sketched(corpus), 0.8)
    found = {pair for pair in combinations(range(len(corpus)), 2) if labels[pair[0]] == labels[pair[1]]}
    expected = {pair for pair in combinations(range(len(corpus)), 2) if groups[pair[0]] == groups[pair[1]]}
    assert len(expected) > 300
    assert found <= expected  # precision is exact: every join was checked
    assert len(found) >= 0.98 * len(expected)


def test_matches_agree_with_brute_force(corpus: list[str]) -> None:
    queries, base = corpus[::3], [text for number, text in enumerate(corpus) if number % 3]
    found = matches(sketched(queries), np.arange(len(queries)), sketched(base), 0.8)
    best = [max(similarity(query, text) for text in base) for query in queries]
    assert all(similarity(queries[row], base[at]) >= 0.8 for row, at in enumerate(found) if at >= 0)
    missed = sum(top >= 0.8 and at < 0 for top, at in zip(best, found, strict=True))
    assert sum(top >= 0.8 for top in best) > 70
    assert missed <= 1


def test_similarity_is_exact(corpus: list[str]) -> None:
    left, right = np.arange(0, 200), np.arange(200, 400)
    texts = sketched(corpus)
    expected = [similarity(corpus[first], corpus[second]) for first, second in zip(left, right, strict=True)]
    assert jaccard(texts, left, texts, right).tolist() == pytest.approx(expected, rel=1e-12)
    same = [similarity(corpus[0], text) for text in corpus[:50]]
    assert jaccard(texts, np.zeros(50, dtype=np.int64), texts, np.arange(50)).tolist() == pytest.approx(same, rel=1e-12)


def test_short_prompts_that_differ_in_a_sign_are_not_near() -> None:
    labels = clusters(sketched(["What is 2+2?", "What is 2*2?", "what is  2+2?"]), 0.8)
    assert labels.tolist() == [0, 1, 0]


# The first three factors and shifts that datasketch 2.0.0 draws (MinHash, affine32), and a hash of all 120 of each.
PUBLISHED = {
    0: ([419304793, 797529183, 1848462571], [682769175, 1451731663, 474057613], "2cf76c15a2e4a6a1"),
    5: ([1906906823, 473993629, 3184566239], [2728834112, 1648849160, 3487094234], "dab6149f89da7b21"),
}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_permutations_are_those_of_datasketch(seed: int) -> None:
    factors, shifts, digest = PUBLISHED[seed]
    a, b = permutations(seed)
    assert (a[:3].tolist(), b[:3].tolist()) == (factors, shifts)
    assert blake2b(np.stack([a, b]).astype("<u4").tobytes(), digest_size=8).hexdigest() == digest


def test_signatures_are_the_smallest_permuted_hashes() -> None:
    texts = [" ".join(f"word{n * k % 37}" for n in range(30)) for k in (1, 2, 3)]
    found = sketched(texts, seed=5).signatures
    factors, shifts = ([int(number) for number in numbers] for numbers in permutations(5))
    for row, text in enumerate(texts):
        rows = TokenRows(5)
        rows.add(map(WordHashes().__getitem__, words(text)))
        hashes = fold32(rows.take()[0]).tolist()
        expected = [min((a * h + b) % 2**32 for h in hashes) for a, b in zip(factors, shifts, strict=True)]
        assert found[row].tolist() == expected


def test_a_crowd_of_near_duplicates_is_one_cluster() -> None:
    base = " ".join(f"w{n}" for n in range(100))
    texts = [f"{base} tail{n}" for n in range(500)]
    assert set(clusters(sketched(texts), 0.8).tolist()) == {0}


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=9), min_size=1, max_size=6), st.integers(1, 5))
def test_runs_never_cross_rows(rows: list[list[int]], width: int) -> None:
    together = TokenRows(width)
    for row in rows:
        together.add(row)
    hashes, starts = together.take()
    alone = list[int]()
    for row, start in zip(rows, starts, strict=True):
        assert start == len(alone)
        padded = row + [0] * (width - len(row))
        for at in range(len(padded) - width + 1):
            value = 0
            for token in padded[at : at + width]:
                value = (value * 0x9E3779B97F4A7C15 + token) % 2**64
            alone.append(value)
    assert hashes.tolist() == alone


def test_fold_is_the_murmur_finaliser() -> None:
    # fmix32 of 1 and of 0xdeadbeef, from the reference implementation of MurmurHash3
    values = np.array([1, 0xDEADBEEF, 1 << 32], dtype=np.uint64)
    assert fold32(values).tolist() == [0x514E28B7, 0x0DE5C6A9, 0x514E28B7]


def test_overlap_agrees_with_brute_force() -> None:
    rng = random.Random(3)
    vocabulary = [f"w{n}" for n in range(40)]
    evaluation = [rng.choices(vocabulary, k=rng.choice((5, 12, 13, 60))) for _ in range(40)]
    train = [rng.choices(vocabulary, k=rng.choice((5, 30, 60))) for _ in range(200)]
    for number in range(0, 200, 7):
        source = evaluation[number % 40]
        train[number] = [*train[number][:3], *source[: rng.choice((11, 12, 13, 20))], *train[number][:3]]
    train[5], train[6] = list(evaluation[0]), evaluation[1][:-1]

    def grams(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[at : at + GRAM]) for at in range(max(1, len(text) - GRAM + 1))}

    collector = GramCollector()
    for owner, text in enumerate(evaluation):
        collector.add(owner, " ".join(text), ())
    overlap = Overlap(index := collector.index())
    for item, text in enumerate(train):
        overlap.add(item, " ".join(text), ())
    wanted = set[tuple[str, ...]]().union(*map(grams, evaluation))
    seen = set[tuple[str, ...]]().union(*map(grams, train))
    assert overlap.items().tolist() == [item for item, text in enumerate(train) if grams(text) & wanted]
    assert index.prompts_with(overlap.is_hit).tolist() == [
        owner for owner, text in enumerate(evaluation) if grams(text) & seen
    ]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # scipy.stats.binomtest(…).proportion_ci(method="wilson"); 0 and n of n are also z²/(n + z²) with z² = 3.841459
    [(15, 20, 0.531299, 0.888138), (0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (81, 263, 0.255289, 0.366210)],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), rel=1e-5, abs=1e-12)


def test_words_and_keys_survive_odd_text() -> None:
    assert words("ΑΒΓ\udc80, ok") == ["αβγ".encode() + b"\xed\xb2\x80", b"ok"]
    assert text_key("\udc80") != text_key("")
    assert LiteralFinder([])("anything") == set()
    assert LiteralFinder(["<s>", "<s>>"])("a <s>> b") == {"<s>>"}
