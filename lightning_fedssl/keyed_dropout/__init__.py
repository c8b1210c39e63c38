"""Dropout whose masks are a function of a key: in training, in what clients compute around it, and in measurements."""

from lightning_fedssl.keyed_dropout.context import (
    KeyedDropout,
    drawing,
    key_of,
    keyed,
    known_without,
    rows_from,
)

__all__ = ["KeyedDropout", "drawing", "key_of", "keyed", "known_without", "rows_from"]
