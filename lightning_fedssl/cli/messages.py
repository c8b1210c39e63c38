"""Error messages for wrong inputs: one line that names the key or file and the remedy."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import isabstract
from traceback import walk_tb
from types import FrameType
from typing import Any, get_args

import torch
from jsonargparse import ArgumentParser
from torch.multiprocessing.spawn import ProcessExitedException

import lightning_fedssl
from lightning_fedssl.cli.keys import SCRIPTS

_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError, RuntimeError)
_ONE_VALUE = (
    "model.network: batch norm got a single value per channel, from a batch of one sample (of an image, in a "
    "layer of 1x1 pixels); use norm: group, a network that shrinks images less, or another batch size"
)
_SEED = re.compile(r"(-?\d+) is not in bounds, numpy accepts from (\d+) to (\d+)")
_MISCONFIGURED = "lightning.fabric.utilities.exceptions.MisconfigurationException"
_PACKAGES = ("lightning_fedssl", "lightning")


def describe(error: BaseException, command: str = "") -> str | None:
    """The message of an error that the user can fix, or None for an error that needs its traceback.

    The user can fix errors that this package or Lightning itself raised, and errors of the machine: a full disk, too
    little memory, a rank that died. jsonargparse wraps errors of constructors, so the causes of an error are searched,
    too.

    Args:
        error: The error.
        command: The command that it ended, such as ``fit``; some remedies depend on it.
    """
    if "Expected more than 1 value per channel" in str(error):
        return _ONE_VALUE
    if match := _SEED.search(str(error)):
        return f"seed_everything is {match[1]}: give a whole number from {match[2]} to {match[3]}"
    for each in _causes(error):
        if _is_ours(each) and not (isinstance(each, OSError) and each.strerror):
            return str(each)
    for each in _causes(error):
        if message := _of_the_machine(each, command):
            return message
    return _of_a_constructor(error)


def _of_a_constructor(error: BaseException) -> str | None:
    """The message of an error in the constructor of a user's or another library's class that a key names."""
    for each in _causes(error):
        frames = [frame for frame, _ in walk_tb(each.__traceback__)]
        parsers = [n for n, frame in enumerate(frames) if _package_of(frame) == "jsonargparse"]
        called = frames[parsers[-1] + 1 :][:1] if parsers else []
        if called and called[0].f_code.co_name == "__init__" and _package_of(called[0]) != _PACKAGES[0]:
            name = type(called[0].f_locals["self"]).__name__
            if isinstance(each, ValueError):
                return f"{name}: {each}"
            return f"{name}: {type(each).__name__}: {each} (FEDSSL_TRACEBACK=1 shows where it comes from)"
    return None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        yield from _of_other_types(current)
        current = current.__cause__


def _of_other_types(error: BaseException) -> Iterator[BaseException]:
    """Errors of the types that jsonargparse tried for one value; it raises a new error from the first of them alone."""
    for frame, _ in walk_tb(error.__traceback__):
        if _package_of(frame) == "jsonargparse":
            tried = frame.f_locals.get("exceptions")
            yield from (each for each in tried or () if isinstance(each, BaseException))


_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPACE_FOR = {
    "fit": (
        ", or set trainer.default_root_dir to a folder on another disk; a run that has saved a checkpoint resumes with "
        "--ckpt_path last"
    ),
    "compare": "; the same command resumes",
    "export": ", or give a folder on another disk as --output",
}
"""What can be done about a full disk besides freeing space, by command."""

_REMEDIES = {
    (errno.EACCES, errno.EPERM, errno.EROFS): "change the permissions, or give a folder that you may write to",
    (errno.ENAMETOOLONG,): "give a shorter path",
    (errno.ENOTDIR, errno.EEXIST, errno.EISDIR): "a file and a folder have the same path: give another path",
    (errno.ENOENT, errno.ELOOP): "give another path",
    (errno.EMFILE, errno.ENFILE): "close other programs, or raise the limit of open files (ulimit -n)",
}
_NO_MEMORY = (
    "not enough memory: make model.network smaller, lower data.client_batch_size, data.eval_batch_size, "
    "data.image_size or trainer.clients_at_once, or use fewer samples (data.max_train_images)"
)


def _of_the_machine(error: BaseException, command: str) -> str | None:
    """The message of an error that the operating system, the memory or another rank has caused."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"{_NO_MEMORY} ({_first_line(error)})" if str(error) else _NO_MEMORY
    if isinstance(error, OSError) and error.strerror:
        remedies = {_FULL_DISK: f"free some space{_SPACE_FOR.get(command, '')}", **_REMEDIES}
        remedy = next((text for numbers, text in remedies.items() if error.errno in numbers), "")
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}" + (f"; {remedy}" if remedy else "")
    if isinstance(error, ProcessExitedException):
        return f"rank {error.error_index} died ({_first_line(error)}); resume with --ckpt_path last"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _is_ours(error: BaseException) -> bool:
    traceback = error.__traceback__
    if not (isinstance(error, _USER_ERRORS) or _is_lightnings(error)) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    if isinstance(error, RuntimeError):  # raised by EarlyStopping for a monitor that does not exist
        return module.startswith("lightning.pytorch.callbacks")
    return module.partition(".")[0] in _PACKAGES


def _is_lightnings(error: BaseException) -> bool:
    """Whether Lightning refuses a setting; compared by name, because an import of Lightning takes seconds."""
    return any(f"{c.__module__}.{c.__name__}" == _MISCONFIGURED for c in type(error).__mro__)


@dataclass
class _Problem:
    """What a message of the parser says.

    Attributes:
        key: The key that the message is about, with its parents; empty if it names none.
        owner: The class whose argument it is about, as an import path; empty if it names none.
        reasons: What is wrong, one entry for each type that the value was tried as.
        value: The value as it was given; empty if the message does not quote it.
    """

    key: str = ""
    owner: str = ""
    reasons: list[str] = field(default_factory=list)
    value: str = ""


_KEY = re.compile(r'(?:Parser key|Key) "([^"]+)":?\s*')
_CALLABLE = re.compile(r"Type .* expects a function or a callable class: ")
_OWNER = re.compile(r"Problem with given class_path '([^']+)':")
_GOT_CLASS = re.compile(r"\. Got value: Namespace\(class_path='([^']+)'.*")
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
    problem = _read(message)
    reasons = [r for r in problem.reasons if not _NOISE.match(r)] or problem.reasons or [message.strip()]
    lines = [_rewrite(reason, problem, options, bases or {}) for reason in reasons]
    expected = [line.removeprefix("expected ") for line in lines if line.startswith("expected ")]
    if expected and len(expected) == len(lines):
        expected = [each for each in expected if each != _CLASS_PATH] or expected
        got = f", got {problem.value}" if problem.value else ""
        hint = "; YAML writes infinity as .inf" if problem.value.lstrip("+-").lower() in ("inf", "infinity") else ""
        text = "expected " + " or ".join(dict.fromkeys(expected)) + got + hint
    else:
        text = next(line for line in lines if not line.startswith("expected "))
    text = text.replace(_HELP, f"{program} --help")
    return f"{problem.key}: {text}" if problem.key else text


def key_of(text: str) -> str:
    """The key that a message of :func:`explain` is about; empty if it names none."""
    match = re.match(r"there is no key ([\w.]+)|([a-z_][\w.]*): ", text)
    return (match[1] or match[2]) if match else ""


def _read(message: str) -> _Problem:
    """Parse the lines; a key with a larger indentation than the last key belongs under it."""
    problem, depth = _Problem(), -1
    for line in message.splitlines():
        indent, text = len(line) - len(line.lstrip()), _CALLABLE.sub("", line.strip().removeprefix("- "))
        if match := _KEY.match(text):
            if indent > depth and match[1] != problem.key:
                # An error in a file of one group names the whole key, not the part below the group's key.
                inside = f"{problem.key}.{match[1]}".lstrip(".")
                problem.key, depth = match[1] if match[1].startswith(f"{problem.key}.") else inside, indent
            text = text[match.end() :]
        if match := _GOT_CLASS.search(text):
            problem.owner = match[1]
        if match := _VALUE.match(text):
            problem.value = problem.value or _GOT_CLASS.sub("", match[1])
        elif match := _OWNER.match(text):
            problem.owner = match[1]
        elif text:
            problem.reasons.append(_GOT_CLASS.sub("", text))
    return problem


def _names_for(key: str) -> list[str]:
    """Names that may be given although they are not names of classes."""
    if key != "metrics":
        return []
    from lightning_fedssl.trainer.evaluation_metrics import MetricName

    return list(get_args(MetricName))


def _rewrite(reason: str, problem: _Problem, options: Sequence[str], bases: Mapping[str, type]) -> str:
    # jsonargparse has no error codes: only its sentences tell the cases apart, the most specific ones first.
    key = problem.key.rpartition(".")[2]
    known = _names_for(key) or _names_below(bases.get(key))
    if "is not accepted before subcommand" in reason:
        return "options must follow the command: lightning-fedssl fit --config FILE"
    if key == "metrics" and "'num_classes' is not accepted" in reason:
        return f"this class is of no single task: give one such as MulticlassRecall, or a name: {', '.join(known)}"
    if match := re.search(r"Option '([^']+)' is not accepted", reason):
        if not problem.owner:
            return _unknown_option(match[1], options)
        return _unknown_argument(match[1], problem, bases)
    if match := re.match(r"Expected a dot import path string: (.*)", reason):
        problem.value = problem.value or match[1]
        return f"there is no class {match[1]}{_suggest(match[1], known)}" if known else f"expected {_CLASS_PATH}"
    if match := re.match(r"Import path .*does not correspond to a subclass of (\w+)", reason):
        return f"{problem.value} is no {match[1]}{_suggest('', known)}, or give a class derived from {match[1]}"
    if match := re.search(r"(Group|Subcommand) '([^']+)' does not accept option '([^']+)'", reason):
        return _unknown_option(f"{match[2]}.{match[3]}" if match[1] == "Group" else match[3], options)
    if match := re.match(r"[Uu]nrecognized arguments: --([^\s=]+)", reason):
        return _unknown_option(match[1], options)
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", reason):
        return f"{match[1]} follows no option; {_remedy_for_value(match[1])}"
    if match := re.match(r"Expected a (.+?)(?:\. Got value: (.*))?$", reason):
        problem.value = problem.value if match[2] is None else match[2]
        return f"expected {_type_name(match[1])}"
    if problem.owner and (match := re.match(r"the following arguments are required: (.*)", reason)):
        return f"{_name(problem.owner)} needs {match[1]}"
    for pattern, text in _SENTENCES.items():
        if match := re.search(pattern, reason):
            return match.expand(text)
    return reason


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
    r"the following arguments are required: replay\.(round|client)": r"\1: missing; give the number from the run's log",
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


def _unknown_argument(name: str, problem: _Problem, bases: Mapping[str, type]) -> str:
    if name == "class_path":
        return "arguments of the class stand one level deeper: {class_path: NAME, init_args: {...}}"
    owner = _name(problem.owner)
    if problem.key == "model" and name in _LEARNING_RATES:
        return f"{owner} takes no {name}; did you mean {_LEARNING_RATE}?"
    base = bases.get("model")
    if problem.key == "model" and base and not problem.owner.startswith(_PACKAGES[0]) and name in _arguments_of(base):
        return f"{owner} takes no {name}: let its __init__ take **kwargs and pass them on to super().__init__(**kwargs)"
    if any(owner == base.__name__ for base in bases.values()):
        return f"name the class before its argument {name}: --{problem.key} NAME, or class_path in a file"
    return f"{owner} takes no {name}{_suggest(name, _arguments(problem.owner))}"


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
