"""The group `tracking`: what means nothing is refused, and nothing of it changes what a run learns."""

from __future__ import annotations

import pytest

from data_shards.errors import UserError
from pipeline.recipe.io import differences, load_recipe
from pipeline.runs.run_folder import recipe_digest

ALL = ["tracking.register_as=digits", "tracking.alias=champion", "tracking.system_metrics=true"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["tracking.alias=champion"], "alias"),
        (["tracking.mode=offline", "tracking.system_metrics=true"], "system_metrics"),
        (["tracking.log_model=false", "tracking.register_as=x"], "register_as"),
        (["tracking.register_as=a/b"], "register_as"),
        (["tracking.register_as=x", "tracking.alias=v3"], "alias"),
        (["tracking.register_as=x", "tracking.alias=a b"], "alias"),
    ],
)
def test_what_means_nothing_or_mlflow_would_refuse_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=key):
        load_recipe("digits", overrides=overrides)


def test_a_run_may_go_on_with_other_keys_of_it() -> None:
    plain, tracked = load_recipe("digits"), load_recipe("digits", overrides=ALL)
    assert differences(plain, tracked) == {}
    assert recipe_digest(plain, stage="finetune") == recipe_digest(tracked, stage="finetune")
