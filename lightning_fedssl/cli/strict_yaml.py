"""Additional checks of YAML files: duplicate keys, keys beside their parents, aliases that repeat too many values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

WITHOUT_CLASS = ("trainer", "data")
"""Keys whose values are mappings of further keys, not classes."""

_OF_KEYS = ("trainer", "data", "model", "init_args")
"""Keys whose values are mappings of further keys."""

MOST_NODES = 100_000
"""The largest number of values in a file after its aliases are expanded."""


def check_yaml_file(path: Path) -> None:
    """Refuse a file that cannot be read as text, or that has duplicate keys or too many values.

    Invalid YAML passes this check: the parser reports it with line and column.

    Args:
        path: The file.

    Raises:
        TypeError: In one line, without the file's name. (jsonargparse expects this type.)
    """
    try:
        check_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise TypeError(f"not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except OSError as error:
        raise TypeError(f"the file cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise TypeError("brackets or lists are nested too deeply; a configuration needs about ten levels") from error
    except ValueError as error:
        raise TypeError(f"a value cannot be read: {str(error).partition(';')[0]}") from error


def check_yaml(text: str) -> None:
    """Refuse duplicate keys, keys beside their parents, and aliases that contain themselves or repeat too many values.

    Args:
        text: YAML.

    Raises:
        TypeError: If a mapping has a key twice, or an alias contains itself or repeats too many values; if the file
            has a key with a dot and its parent, such as ``model.network`` and ``model``.
        ValueError: If a number or a date is out of range.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return
        _size(root, {}, set())
        for node in _mappings(root, set()):
            _check_keys(node)
        for node in _mappings_of_keys(root):
            _check_parents([(str(key.value), value) for key, value in node.value])
        yaml.safe_load(text)
    except yaml.YAMLError:
        return


def _check_keys(node: yaml.MappingNode) -> None:
    keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    counts = Counter(key.value for key in keys)
    for key in keys:
        if counts[key.value] > 1:
            lines = ", ".join(str(k.start_mark.line + 1) for k in keys if k.value == key.value)
            raise TypeError(
                f"the key {key.value} is given more than once (lines {lines}); merge the entries, "
                "since YAML would silently take the last one alone"
            )


def _check_parents(entries: list[tuple[str, yaml.Node]]) -> None:
    """Refuse a key with dots beside the class that takes it, or before its parent: jsonargparse would drop one."""
    for place, (parent, value) in enumerate(entries):
        below = [(number, key) for number, (key, _) in enumerate(entries) if is_below(key, parent)]
        keeps_later_keys = isinstance(value, yaml.MappingNode) and not _has_class(value)
        for key in [key for number, key in below if number < place or not keeps_later_keys]:
            form = "{...}" if parent in WITHOUT_CLASS else "{class_path: NAME, init_args: {...}}"
            raise TypeError(
                f"the keys {parent} and {key} are both given, and one of them would be lost: write one mapping, "
                f"{parent}: {form}"
            )


def _has_class(node: yaml.MappingNode) -> bool:
    return any(key.value == "class_path" for key, _ in node.value)


def is_below(key: str, parent: str) -> bool:
    """Whether a key with dots is an argument of what another key names, as ``model.network`` is of ``model``."""
    return key.startswith(f"{parent}.")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.MappingNode]:
    """Every mapping once, also if several aliases refer to it."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
    for child in _children(node):
        yield from _mappings(child, seen)


def _mappings_of_keys(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    """The mappings whose keys are those of the parser: the file itself, its groups, and arguments of classes.

    Another mapping may be a value, where a dot has no meaning, or the overrides of a suite, which are read in order.
    """
    if isinstance(root, yaml.MappingNode):
        yield root
    for node in _mappings(root, set()):
        for key, value in node.value:
            if isinstance(value, yaml.MappingNode) and str(key.value).rpartition(".")[2] in _OF_KEYS:
                yield value


def _size(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """The number of values below a node after all aliases are expanded.

    Args:
        node: The node.
        known: Sizes found so far, by the nodes' ids.
        above: Ids of the nodes that contain this one.
    """
    if id(node) in above:
        raise TypeError("an alias (*) refers to a value that contains it; write the value instead")
    if id(node) not in known:
        known[id(node)] = 1 + sum(_size(child, known, above | {id(node)}) for child in _children(node))
    if known[id(node)] > MOST_NODES:
        raise TypeError(f"aliases (*) repeat more than {MOST_NODES:,} values; use fewer of them")
    return known[id(node)]
