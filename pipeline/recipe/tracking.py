"""The recipe's group `tracking`: what MLflow is told of a run, and when."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.recipe.duration import Strict

_LONGEST_NAME = 250  # what MLflow's server takes of a registered model's name and of an alias
_VERSION = re.compile("v[0-9]+", re.IGNORECASE)  # MLflow's own names of versions


class TrackingConfig(Strict):
    """What is sent to MLflow; changes nothing that is learnt."""

    mode: Literal["online", "offline"] = "online"
    """online: while training goes on; offline: nothing is sent, and `shardvit sync` sends it all later."""
    system_metrics: bool = False
    """CPU, memory, network, disk and GPU of each node every ten seconds, by a process beside its first rank."""
    log_model: bool = True
    """The last stage's model becomes one of MLflow's, which loads without shardvit; false: it stays in the run's
    folder alone."""
    register_as: str | None = Field(default=None, min_length=1, max_length=_LONGEST_NAME)
    """The registered model whose next version the model becomes."""
    alias: str | None = Field(default=None, min_length=1, max_length=_LONGEST_NAME)
    """An alias of that version, such as champion; it leaves the version that had it."""

    @field_validator("register_as")
    @classmethod
    def _name_of_a_model(cls, name: str | None) -> str | None:
        if name is not None and re.search("[/:]", name):
            raise ValueError(f"register_as {name!r}: MLflow takes no '/' and no ':' in a model's name")
        return name

    @field_validator("alias")
    @classmethod
    def _name_of_an_alias(cls, alias: str | None) -> str | None:
        if alias is None:
            return None
        if not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
            raise ValueError(f"alias {alias!r}: give letters (a to z), digits, '_' and '-'")
        if _VERSION.fullmatch(alias) or alias == "latest":
            raise ValueError(f"alias {alias!r} is what MLflow calls a version itself: give another")
        return alias

    @model_validator(mode="after")
    def _nothing_ignored(self) -> TrackingConfig:
        if self.mode == "offline":
            self.refuse("system_metrics", means_nothing="offline, as they are not kept to be sent later")
        if not self.log_model:
            self.refuse("register_as", means_nothing="where no model is logged")
        if self.register_as is None:
            self.refuse("alias", means_nothing="without register_as")
        return self
