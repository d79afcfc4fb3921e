"""Reading fields of a head's ``config.json``; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class HeadError(ValueError):
    """A draft head cannot be used; the message names the field, its value and the fix."""


def optional_positive_int(fields: Mapping[str, Any], name: str, prefix: str = "") -> int | None:
    """``fields[name]``, None where absent; HeadError unless it is a positive integer."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HeadError(f"{prefix}{name} is {value!r}; it must be a positive integer")
    return value


def positive_int(fields: Mapping[str, Any], name: str, prefix: str = "") -> int:
    """``fields[name]``; HeadError where it is absent or not a positive integer."""
    value = optional_positive_int(fields, name, prefix)
    if value is None:
        raise HeadError(f"{prefix}{name} is missing from config.json; add it as a positive integer")
    return value


def boolean(fields: Mapping[str, Any], name: str, default: bool, prefix: str = "") -> bool:
    """``fields[name]`` or ``default``; HeadError unless it is true or false."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise HeadError(f"{prefix}{name} is {value!r}; it must be true or false")
    return value


def positive_number(fields: Mapping[str, Any], name: str, default: float) -> float:
    """``fields[name]`` or ``default``; HeadError unless it is a number above 0."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise HeadError(f"{name} is {value!r}; it must be a positive number")
    return float(value)


def section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object at ``fields[name]``, an empty one where absent; HeadError for another value."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise HeadError(f"{name} is {value!r}; it must be an object")
    return value
