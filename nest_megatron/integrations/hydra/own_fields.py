"""Planned fields that an application knows, and those that only our group has added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra.view import AppView, has_path


def planned_fields(view: AppView) -> tuple[str, ...]:
    """Paths that hold a value of the plan, in the order of the configuration."""
    places = {view.place(item) for _, item in view.uses()}
    return tuple(path for path, item in view.uses() if path in places and view.is_planned(item))


def require_own_fields(view: AppView, own: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse to plan where the application would not read the plan.

    Args:
        own: the application's configuration as it is without the group ``nest``.

    Returns:
        Planned fields that the application's own configuration lacks; it may read them all the
        same, as NeMo does.

    Raises:
        UserInputError: if it lacks all of them.
    """
    planned = planned_fields(view)
    lacking = tuple(path for path in planned if not has_path(own, path))
    if planned and lacking == planned:
        raise UserInputError(
            "+nest",
            value=", ".join(planned[:3]),
            limit="none of the planned fields is in the application's own configuration, so it "
            "would train without the plan",
            fix="Write a group nest with the application's own fields (docs/hydra_apps.md).",
        )
    return lacking
