"""Constitutions: what is read, what is refused, and which principle is drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from malformed_constitutions import CASES, GOOD, Malformed, attempt

from kedge.core.errors import ConfigError
from kedge.feedback.constitution import Principle, draw, fingerprint, read_constitution

SHIPPED = Path(__file__).parents[2] / "recipes/rules/constitution.yaml"


def principle(name: str, weight: float = 1.0) -> Principle:
    return Principle(id=name, critique="?", revision="!", choice="?", weight=weight)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_malformed_constitution_is_refused_with_file_line_and_field(case: Malformed) -> None:
    assert attempt(case) is None


def test_twenty_principles_of_our_own_are_shipped() -> None:
    principles = read_constitution(SHIPPED)
    assert len({one.id for one in principles}) == 20
    assert Counter(one.axis for one in principles) == {"harmless": 7, "respectful": 5, "honest": 5, "helpful": 3}
    texts = [text for one in principles for text in (one.critique, one.revision, one.choice)]
    assert len(set(texts)) == 60
    assert all(one.choice.endswith("?") and one.choice.startswith("Which answer") for one in principles)


def test_what_is_left_out_has_defaults_and_lines_are_joined(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(GOOD.replace("Make it polite.", ">-\n      Make it\n      polite."))
    (rude,) = read_constitution(file)
    assert (rude.revision, rude.weight, rude.axis) == ("Make it polite.", 1.0, "overall")


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"there is no such constitution.*rules\.yaml"):
        read_constitution(tmp_path / "rule.yaml")


def test_principles_are_drawn_by_weight_and_each_draw_is_its_own() -> None:
    principles = [principle("a"), principle("b", 2), principle("c", 5)]
    keys = [f"{number}" for number in range(4000)]
    counts = Counter(draw(principles, seed=7, key=key).id for key in keys)
    for name, share in (("a", 1 / 8), ("b", 2 / 8), ("c", 5 / 8)):
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03)  # four standard errors
    other_seed = [draw(principles, seed=8, key=key).id for key in keys]
    assert other_seed != [draw(principles, seed=7, key=key).id for key in keys]
    backwards = [draw(principles, seed=8, key=key).id for key in reversed(keys)]
    assert backwards[::-1] == other_seed
    with pytest.raises(ConfigError, match="no principle"):
        draw([], seed=7, key="x")


def test_other_words_are_another_constitution() -> None:
    assert fingerprint([principle("a")]) == fingerprint([principle("a")])
    assert len({fingerprint([principle("a")]), fingerprint([principle("a", 2)]), fingerprint([principle("b")])}) == 3
