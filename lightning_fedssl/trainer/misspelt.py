"""Warns of functions of a user's class that nearly have the name of one that they could override."""

from __future__ import annotations

import difflib
import logging
from types import FunctionType

_log = logging.getLogger(__name__)

_PACKAGES = ("lightning_fedssl.", "lightning.", "pytorch_lightning.")


def warn_of_misspelt_functions(part: object, base: type) -> None:
    """Warn of a public function of the user's class with nearly the name of one that it could override and does not.

    Args:
        part: An algorithm or a callback.
        base: The class whose functions, and those of its subclasses in these packages, are meant to be overridden.
    """
    mro = type(part).__mro__
    first = next((i for i, c in enumerate(mro) if c.__module__.startswith(_PACKAGES)), len(mro))
    known = {name for c in mro[first:] for name in vars(c)}
    hooks = {name for c in mro[first:] if issubclass(c, base) for name in vars(c) if name[0] != "_"}
    for c in mro[:first]:
        for name in (name for name, value in vars(c).items() if name not in known and _is_public_function(name, value)):
            if meant := difflib.get_close_matches(name, sorted(hooks - vars(c).keys()), 1, cutoff=0.85):
                _log.warning("%s.%s overrides nothing: did you mean %s?", c.__name__, name, meant[0])


def _is_public_function(name: str, value: object) -> bool:
    return name[0] != "_" and isinstance(value, FunctionType | property)
