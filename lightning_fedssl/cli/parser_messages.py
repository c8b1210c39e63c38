"""The parser's messages in one line that names the key and the remedy. Nothing here imports PyTorch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import isabstract, signature
from typing import Any, get_args

from jsonargparse import ArgumentParser

import lightning_fedssl
from lightning_fedssl.cli.keys import SCRIPTS


@dataclass
class _Reason:
    """Why a value does not fit one of the types that it was tried as.

    Attributes:
        text: The parser's sentence.
        key: The key that it is about, with its parents; empty if there is none.
        owner: The class whose argument it is about, as an import path; empty if there is none.
        value: The value as it was given; empty if the message does not quote it.
    """

    text: str
    key: str = ""
    owner: str = ""
    value: str = ""


@dataclass
class _Place:
    """Where in an indented message a key or a class is named, which the lines with a larger indentation are about."""

    indent: int
    key: str = ""
    owner: str = ""


_KEY = re.compile(r'(?:Parser key|Key) "([^"]+)":?\s*')
_CALLABLE = re.compile(r"Type .* expects a function or a callable class: ")
_OWNER = re.compile(r"Problem with given class_path '([^']+)':")
_GOT_OBJECT = re.compile(r"\. Got value: (?:Namespace|NestedArg)\((?:class_path='([^']+)')?.*")
_CLASS_OF_VALUE = re.compile(r"(?:Namespace\(class_path=|\{'class_path': )'([^']+)'.*")
_VALUE = re.compile(r"Given value: (.*)")
_NOISE = re.compile(
    r"Unable to load config |Expected a path but |Expected a <class '(NoneType|list|dict)'>|Does not validate against"
    r"|Subtypes:|Errors:"
    r"|Given value type:|Not a valid subclass|Subclass types expect|a class path \(str\)|a dict with"
)


def explain(
    message: str,
    options: Sequence[str] = (),
    bases: Mapping[str, type] | None = None,
    program: str = "lightning-fedssl fit",
) -> str:
    """Say in one line what a message of jsonargparse means.

    Args:
        message: What the parser gave to its ``error`` method.
        options: The keys that the command takes, for suggestions.
        bases: The base class of the classes that may be named under a key (its last part), for suggestions.
        program: The command whose help lists its keys.
    """
    if match := re.search(r"Problems parsing config: (?:.*\n)*?([^\n]*)\n.*, (line \d+, column \d+)\s*$", message):
        hint = "; indent with blanks, not with tabs" if "start any token" in match[1] else ""
        return f"not valid YAML, {match[2]}: {match[1].strip()}{hint}"
    reasons = _decisive(_read(message), bases or {}) or [_Reason(message.strip())]
    lines = [_rewrite(reason, options, bases or {}) for reason in reasons]
    expected = [line.removeprefix("expected ") for line in lines if line.startswith("expected ")]
    if expected and len(expected) == len(lines):
        expected = [each for each in expected if each != _CLASS_PATH] or expected
        value = next((reason.value for reason in reversed(reasons) if reason.value), "")
        got = f", got {value}" if value else ""
        hint = "; YAML writes infinity as .inf" if value.lstrip("+-").lower() in ("inf", "infinity") else ""
        text = "expected " + " or ".join(dict.fromkeys(expected)) + got + hint
    else:
        text = next(line for line in lines if not line.startswith("expected "))
    text = text.replace(_HELP, f"{program} --help")
    return f"{reasons[0].key}: {text}" if reasons[0].key else text


def key_of(text: str) -> str:
    """The key that a message of :func:`explain` is about; empty if it names none."""
    match = re.match(r"there is no key ([\w.]+)|([a-z_][\w.]*): ", text)
    return (match[1] or match[2]) if match else ""


def _read(message: str) -> list[_Reason]:
    """The reasons that a message gives, with the keys and classes that they are about."""
    reasons: list[_Reason] = []
    places, values = [_Place(-1)], dict[str, str]()
    for line in filter(str.strip, message.splitlines()):
        indent, text = len(line) - len(line.lstrip()), _CALLABLE.sub("", line.strip().removeprefix("- "))
        while len(places) > 2 and indent <= places[-1].indent:
            places.pop()
        if match := _KEY.match(text):
            places.append(_Place(indent, _inside(places[-1].key, match[1])))
            text = text[match.end() :]
        key, owner = places[-1].key, places[-1].owner
        if match := _VALUE.match(text):
            values.setdefault(key, match[1])
        elif match := _OWNER.match(text):
            places.append(_Place(indent, key, match[1]))
        elif text:
            found = _GOT_OBJECT.search(text)
            reasons.append(_Reason(_GOT_OBJECT.sub("", text), key, (found and found[1]) or owner))
    for reason in reasons:
        given = values.get(reason.key, next(iter(values.values()), ""))
        named = _CLASS_OF_VALUE.match(values.get(reason.key, ""))
        reason.owner = reason.owner or (named[1] if named else "")
        reason.value = _plain_value(given)
    return reasons


def _inside(parent: str, key: str) -> str:
    """A key with its parents; an error in a file of one group names the whole key, not the part below the group's."""
    return key if key == parent or key.startswith(f"{parent}.") else f"{parent}.{key}".lstrip(".")


def _plain_value(value: str) -> str:
    """A value as it was typed; of an object of the parser, the class that it names."""
    if match := re.fullmatch(r"NestedArg\(key='[^']*', val=(.*)\)", value):
        return match[1].strip("'")
    if match := _CLASS_OF_VALUE.fullmatch(value):
        return match[1]
    return "" if "Namespace(" in value else value


_MISMATCH = re.compile(
    r"Expected '[^']+' to be a |Import path .*does not correspond to a subclass of|Dict must include a class_path"
)
_GIVEN_AND_BASE = re.compile(
    r"(?:Expected '([^']+)'|Import path (?:(\S+) )?does not).* (?:subclass of|returns) (?:<class ')?([\w.]+)"
)
_ARGUMENT_OF_FUNCTION = re.compile(r"Dict must include a class_path .*NestedArg\(key='([^']+)', val=")
_UNKNOWN_ARGUMENT = re.compile(r"Option '([^']+)' is not accepted")
_FROM_DATA = ("num_classes", "in_shape", "in_channels")
"""Arguments of a network that only some of the types of ``network`` refuse, because the data set them."""


def _decisive(reasons: list[_Reason], bases: Mapping[str, type]) -> list[_Reason]:
    """The reasons of the type that the value was meant as: the parser gives one for every type that it tried.

    A type got further if its reason is about an argument of the class, and further still if it is about a value of an
    argument, which has a key of its own.
    """
    deepest = max((reason.key for reason in reasons), key=lambda key: key.count("."), default="")
    there = [reason for reason in reasons if reason.key == deepest]
    there = [reason for reason in there if not _NOISE.match(reason.text)] or there
    ranks = [_rank(reason, bases) for reason in there]
    best = min(filter(None, ranks), default=0)
    return [reason for reason, rank in zip(there, ranks, strict=True) if rank in (0, best)]


def _rank(reason: _Reason, bases: Mapping[str, type]) -> int:
    """The lower, the closer a type came to the value; 0 if the reason is only what the type expects."""
    if _MISMATCH.match(reason.text):
        return 1 if _ARGUMENT_OF_FUNCTION.match(reason.text) else 3
    if match := _UNKNOWN_ARGUMENT.search(reason.text):
        set_by_data = _is_network(reason) and match[1] in _FROM_DATA
        return 2 if set_by_data or _is_base(reason.owner, bases) else 1
    return 0 if reason.text.startswith("Expected a ") else 1


def _is_network(reason: _Reason) -> bool:
    return _name(reason.key) == "network"


def _is_base(owner: str, bases: Mapping[str, type]) -> bool:
    return any(_name(owner) == base.__name__ for base in bases.values())


def _names_for(key: str) -> list[str]:
    """Names that may be given although they are not names of classes."""
    if key != "metrics":
        return []
    from lightning_fedssl.trainer.evaluation_metrics import MetricName

    return list(get_args(MetricName))


def _rewrite(reason: _Reason, options: Sequence[str], bases: Mapping[str, type]) -> str:
    # jsonargparse has no error codes: only its sentences tell the cases apart, the most specific ones first.
    text, key = reason.text, reason.key.rpartition(".")[2]
    known = _names_for(key) or _names_below(bases.get(key))
    if "is not accepted before subcommand" in text:
        return "options must follow the command: lightning-fedssl fit --config FILE"
    if key == "metrics" and "'num_classes' is not accepted" in text:
        return f"this class is of no single task: give one such as MulticlassRecall, or a name: {', '.join(known)}"
    if match := _UNKNOWN_ARGUMENT.search(text):
        return _unknown_argument(match[1], reason, bases) if reason.owner else _unknown_option(match[1], options)
    if match := re.match(r"Expected a dot import path string: (.*)", text):
        reason.value = reason.value or match[1]
        return f"there is no class {match[1]}{_suggest(match[1], known)}" if known else f"expected {_CLASS_PATH}"
    if _MISMATCH.match(text):
        return _mismatch(reason, known)
    if match := re.search(r"(Group|Subcommand) '([^']+)' does not accept option '([^']+)'", text):
        return _unknown_option(f"{match[2]}.{match[3]}" if match[1] == "Group" else match[3], options)
    if match := re.match(r"[Uu]nrecognized arguments: --([^\s=]+)", text):
        return _unknown_option(match[1], options)
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", text):
        return f"{match[1]} follows no option; {_remedy_for_value(match[1])}"
    if match := re.match(r"Expected a (.+?)(?:\. Got value: (.*))?$", text):
        reason.value = reason.value if match[2] is None else match[2]
        return f"expected {_type_name(match[1])}"
    if reason.owner and (match := re.match(r"the following arguments are required: (.*)", text)):
        return f"{_name(reason.owner)} needs {match[1]}"
    for pattern, sentence in _SENTENCES.items():
        if match := re.search(pattern, text):
            return match.expand(sentence)
    return text


def _mismatch(reason: _Reason, known: Sequence[str]) -> str:
    """What to do about a class or function of another type."""
    if match := _ARGUMENT_OF_FUNCTION.match(reason.text):
        if not _is_network(reason):
            return f"a function takes no {match[1]} here: give a class whose __init__ takes it"
        return f"a function takes its arguments with its name: {_with_arguments(reason.key, 'NAME', [match[1]])}"
    match = _GIVEN_AND_BASE.match(reason.text)
    if match is None:
        return reason.text
    given, base = match[1] or match[2] or reason.value, match[3].rstrip(".")
    base = "torch.nn.Module" if base in ("Network", "Module") else base  # any module is accepted as a network
    if "function that returns" not in reason.text:
        return f"{given} is no {base}{_suggest('', known)}, or give a class derived from {base}"
    if _is_network(reason) and set(missing := _required(given)) - set(_FROM_DATA):
        return f"{_name(given)} needs {', '.join(missing)}: {_with_arguments(reason.key, given, missing)}"
    return f"{given} does not say that it returns {base}: write def {_name(given)}(...) -> {base}"


def _with_arguments(key: str, function: str, names: Sequence[str]) -> str:
    values = ", ".join(f"{name}: VALUE" for name in names)
    return f"--{key} '{{class_path: {function}, init_args: {{{values}}}}}'"


def _required(path: str) -> list[str]:
    """Names of the arguments that a function needs."""
    module, _, name = path.rpartition(".")
    try:
        parameters = signature(getattr(import_module(module), name)).parameters.values()
    except (ImportError, AttributeError, ValueError):
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return [p.name for p in named if p.default is p.empty]


def _remedy_for_value(value: str) -> str:
    """What to do with a value that no option takes."""
    if value.endswith((".yaml", ".yml")):
        return f"give a configuration as --config {value}"
    return f"give it as --ckpt_path {value}" if value.endswith(".ckpt") else "remove it"


_SENTENCES = {
    r"No module named '([^']+)'": (
        r"No module named '\1'; modules are searched in the folder that the command runs in, on PYTHONPATH and among "
        "the installed packages"
    ),
    r"the following arguments are required: (?:\w+\.)?model$": (
        "model: missing; give --config FILE, or --model with the name of a method"
    ),
    r"the following arguments are required: (.*)": r"missing: \1",
    r"File does not exist: '?([^']*)'?": r"there is no file \1",
    r"argument subcommand: invalid choice: (\S+) \(choose from (.*)\)": (
        rf"\1 is no command; the commands are \2, {', '.join(map(repr, SCRIPTS))}"
    ),
    r"argument --(\S+): expected one argument": r"\1 needs a value",
    r"Unexpected config": "the file holds no keys; it needs trainer, model and data",
}


_LEARNING_RATES = ("lr", "learning_rate")
_LEARNING_RATE = "model.optimizer.lr"
"""Where the learning rate is, and names under which it is looked for elsewhere."""


def _unknown_option(name: str, options: Sequence[str]) -> str:
    if "model" in options and name.removeprefix("optimizer.") in _LEARNING_RATES:
        return f"there is no key {name}; did you mean {_LEARNING_RATE}?"
    group = [option for option in options if option.startswith(name.partition(".")[0] + ".")]
    return f"there is no key {name}{_suggest(name, options, group)}"


def _unknown_argument(name: str, reason: _Reason, bases: Mapping[str, type]) -> str:
    if name == "class_path":
        return "arguments of the class stand one level deeper: {class_path: NAME, init_args: {...}}"
    owner = _name(reason.owner)
    if reason.key == "model" and name in _LEARNING_RATES:
        return f"{owner} takes no {name}; did you mean {_LEARNING_RATE}?"
    base = bases.get("model")
    if (
        reason.key == "model"
        and base
        and not reason.owner.startswith(lightning_fedssl.__name__)
        and name in _arguments_of(base)
    ):
        return f"{owner} takes no {name}: let its __init__ take **kwargs and pass them on to super().__init__(**kwargs)"
    if _is_base(reason.owner, bases):
        return f"name the class before its argument {name}: --{reason.key} NAME, or class_path in a file"
    return f"{owner} takes no {name}{_suggest(name, _arguments(reason.owner))}"


def _name(path: str) -> str:
    return path.rpartition(".")[2]


_CLASS_PATH = "a class path"
"""Said where no class is known that fits: then another type, such as a number, is what is meant, if there is one."""

_HELP = "THE HELP OF THE COMMAND"
"""Stands for the command in a hint until :func:`explain` fills it in."""


def _suggest(name: str, known: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """A hint: a close match if there is one, in upper or lower case, else the possible names."""
    in_lower_case = {each.lower(): each for each in known if each != name}
    if close := difflib.get_close_matches(name.lower(), in_lower_case, n=1):
        return f"; did you mean {in_lower_case[close[0]]}?"
    listed = known if listed is None else listed
    return f"; there are: {', '.join(sorted(listed))}" if listed else f"; see {_HELP}"


def _arguments(path: str) -> list[str]:
    """Names of the arguments of a class or function, including those that it passes on."""
    module, _, name = path.rpartition(".")
    parser = ArgumentParser(exit_on_error=False)
    try:
        target: Any = getattr(import_module(module), name)
        add: Callable[..., list[str]] = (
            parser.add_class_arguments if isinstance(target, type) else parser.add_function_arguments
        )
        return add(target, fail_untyped=False)
    except (ImportError, AttributeError, ValueError):
        return []


def _arguments_of(base: type) -> list[str]:
    return _arguments(f"{base.__module__}.{base.__name__}")


def _names_below(base: type | None) -> list[str]:
    """Names of the public classes derived from a base; those of this package, which it offers, if there are any."""
    classes = [c for c in _below(base) if not c.__name__.startswith("_") and not isabstract(c)] if base else []
    ours = [c for c in classes if c.__module__.startswith("lightning_fedssl")]
    offered = [c for c in ours if c.__name__ in lightning_fedssl.__all__]
    return sorted({c.__name__ for c in offered or ours or classes})


def _below(base: type) -> Iterator[type]:
    classes: list[type] = type.__subclasses__(base)
    for derived in classes:
        yield derived
        yield from _below(derived)


_TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
_TYPE_NAMES |= dict.fromkeys(["tuple", "list", "collections.abc.Sequence"], "a list in brackets")


def _type_name(annotation: str) -> str:
    if match := re.fullmatch(r"<class '(.+)'>", annotation):
        return _TYPE_NAMES.get(match[1], match[1])
    if match := re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", annotation):
        names = match[1].replace("'", "")
        return f"one of {names}" if "," in names else names
    return annotation
