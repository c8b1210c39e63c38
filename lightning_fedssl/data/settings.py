"""Checks of the data module's settings; a message names the key."""

from __future__ import annotations

from typing import Literal

from lightning_fedssl.data.partition.base import Iid, Partition


def at_least_one(key: str, value: int) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**18:
        below = " and below 1e18" if value > 1 else ""
        raise ValueError(f"data.{key} must be a whole number of at least 1{below}, got {value!r}")
    return value


def none_or_at_least_one(key: str, value: int | None) -> int | None:
    """None, or a whole number of at least 1."""
    return None if value is None else at_least_one(key, value)


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """One of some words."""
    if value not in choices:
        raise ValueError(f"data.{key} must be one of {', '.join(choices)}; got {value!r}")


def num_labels(value: int | Literal["all"]) -> int | Literal["all"]:
    """A whole number of at least 1, or ``all``."""
    if value == "all":
        return "all"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'data.num_labels must be a whole number of at least 1, or "all"; got {value!r}')
    return value


def partition(value: object) -> Partition:
    """A partition; :class:`Iid` for None."""
    if value is None:
        return Iid()
    if not isinstance(value, Partition):
        raise ValueError(f"data.partition is {value!r}; in Python give an object, such as Iid() or Dirichlet(0.3)")
    return value


def validation(value: float | Literal["test"]) -> float | Literal["test"]:
    """A fraction from 0 to below 1, or ``test``."""
    if value == "test":
        return "test"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f'data.validation must be a fraction from 0 to below 1, or "test"; got {value!r}')
    return float(value)
