"""What `import kedge` offers, and that it waits for nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import kedge
import kedge.data
from kedge.core.answers import Answer
from kedge.core.plugins import find


def test_the_names_need_no_torch() -> None:
    code = (
        "import sys, kedge\n"
        "assert not {'pydantic', 'numpy', 'torch'} & set(sys.modules), 'import kedge'\n"
        "kedge.PPO, kedge.Recipe, kedge.Run, kedge.load_model, kedge.Answer, kedge.data\n"
        "kedge.PPO(model='tiny', reward=lambda answer: 1.0, prompts=['one'], iterations=3).recipe().resolved()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'kedge.PPO'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_listed() -> None:
    for name in kedge.__all__:
        assert name in dir(kedge)
        assert getattr(kedge, name) is not None
    assert kedge.Answer is Answer
    assert isinstance(kedge.algorithms, ModuleType)
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        kedge.Trainer  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_data_offers_functions_whatever_was_imported_before() -> None:
    for name in kedge.data.__all__:
        function = getattr(kedge.data, name)
        assert function.__name__ == name
        assert function.__doc__
    assert set(kedge.data.__all__) <= set(dir(kedge.data))


@pytest.mark.parametrize("name", ["SFT", "Reward", "Preference", "Group", "PPO", "BestOfN", "Evaluate"])
def test_a_class_shows_the_settings_of_its_stage(name: str) -> None:
    import inspect

    made = getattr(kedge, name)
    settings = find("stages", made.kind).settings.model_fields
    keywords = inspect.signature(made).parameters
    assert set(settings) - {"kind", "base"} <= set(keywords)
    assert {"model", "seed", "device", "trackers", "alerts", "chat_template"} <= set(keywords)
    assert not {"kind", "from", "base"} & set(keywords)
    assert f"\nseed: {find_description('seed')}" in made.__doc__


def find_description(name: str) -> str | None:
    from kedge.recipe.schema import RecipeSettings

    return RecipeSettings.model_fields[name].description


def test_no_setting_of_a_stage_is_called_like_one_of_the_whole_recipe() -> None:
    from kedge.api.stages import TOP
    from kedge.core.plugins import names

    for kind in names("stages"):
        settings = find("stages", kind).settings
        assert not set(TOP) & {info.alias or name for name, info in settings.model_fields.items()}
