"""The arguments of a method's constructor, written as attributes with a type and a default."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import InitVar
from inspect import Parameter
from typing import Any, ClassVar, TypeVar

from torch.optim import Optimizer
from typing_extensions import dataclass_transform

Method = TypeVar("Method", bound=type[Any])


@dataclass_transform(kw_only_default=True, eq_default=False)
def hyperparameters(method: Method) -> Method:
    """Make the attributes of a class that have a type the arguments of its constructor, by name.

    As in a dataclass, a subclass has the arguments of its base class, and states an attribute again
    to change its default. Type checkers, editors and the command line therefore know all of them.
    An ``InitVar`` is an argument that is given to ``__post_init__``. Attributes without a type are
    not arguments, and neither are ``ClassVar``. It is not a dataclass, which Lightning Fabric takes
    for a collection of tensors.

    Args:
        method: The class, without a constructor of its own. The types of its attributes are
            imported at run time.

    Raises:
        TypeError: The class has a constructor, or a default that all its objects would share.

    Example:
        >>> from lightning_fedssl import CNN, FedAvg, hyperparameters
        >>> @hyperparameters
        ... class Clipped(FedAvg):
        ...     client_epochs: float = 5
        ...     bound: float = 0.1
        >>> Clipped(network=CNN, bound=0.2, prox_mu=0.01).bound
        0.2
    """
    cls: Any = method
    if "__init__" in vars(cls):
        raise TypeError(f"{cls.__name__} has an __init__: write what it checks as check_arguments")
    init_only = inspect.signature(cls.__post_init__).parameters
    parameters = {"self": Parameter("self", Parameter.POSITIONAL_ONLY)}
    for name, kind in inspect.get_annotations(cls, eval_str=True).items():
        if kind is not ClassVar and getattr(kind, "__origin__", None) is not ClassVar:
            default = vars(cls).get(name, Parameter.empty)
            if type(default).__hash__ is None:
                raise TypeError(f"{cls.__name__}.{name}: its objects would share {default}")
            kind = kind.type if isinstance(kind, InitVar) else kind
            parameters[name] = Parameter(
                name, Parameter.KEYWORD_ONLY, default=default, annotation=kind
            )
            if name in init_only and name in vars(cls):
                delattr(cls, name)  # it would hide an attribute of a base class
    for name, parameter in inspect.signature(super(cls, cls).__init__).parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            parameters.setdefault(name, parameter)
    signature = inspect.Signature([*parameters.values()])

    def __init__(self: Any, *unnamed: Any, **named: Any) -> None:  # noqa: N807
        kind = type(self)
        try:
            bound = signature.bind(self, *unnamed, **named)
        except TypeError as error:
            raise TypeError(f"{kind.__name__}: {error}; arguments are given by name") from None
        bound.apply_defaults()
        values = bound.arguments
        del values["self"]
        derived = kind.__mro__[: kind.__mro__.index(cls)]
        for name in values:
            changed = vars(cls).get(name, parameters[name].default) is not parameters[name].default
            if changed or any(name in vars(each) for each in derived):
                raise TypeError(
                    f"{kind.__name__}.{name} does not change the default of {name}: write {name} "
                    "with its type, as in a dataclass, and @hyperparameters before class"
                )
            if name not in init_only:
                vars(self)[name] = values[name]
        self.__post_init__(**{name: values[name] for name in values if name in init_only})
        # What the command line has given, and arguments of an __init__ of a derived class.
        # Lightning adds those of a module whose constructor makes this one.
        self.save_hyperparameters()
        of_inits = set[str]()
        for each in kind.__mro__:
            if "__init__" in vars(each):
                of_inits |= inspect.signature(vars(each)["__init__"]).parameters.keys()
        for name in [*self.hparams]:
            if name not in of_inits and not name.startswith("_"):
                del self.hparams[name]
        for name, value in values.items():
            written = self.hparams.get(name)
            if not (isinstance(written, dict) and "class_path" in written):
                self.hparams[name] = value

    cls.__init__ = __init__
    cls.__init__.__signature__ = signature
    cls.__init__.__annotations__ = {name: parameters[name].annotation for name in parameters}
    return method


def patterns(given: Sequence[str] | str) -> list[str]:
    """The patterns of names of an argument that may be a single one."""
    return [given] if isinstance(given, str) else list(given)


def require(valid: bool, key: str, value: object, remedy: str) -> None:
    """Refuse an argument of a method.

    Args:
        valid: Whether its value is possible.
        key: Its name.
        value: Its value.
        remedy: What to give instead.

    Raises:
        ValueError: Names the key.
    """
    if not valid:
        raise ValueError(f"model.{key} is {value}: {remedy}")


def require_factory(key: str, optimizer: object) -> None:
    """Refuse an optimizer where a function that makes one is needed.

    Args:
        key: The name of the argument.
        optimizer: Its value.

    Raises:
        ValueError: Names the key.
    """
    name = type(optimizer).__name__
    remedy = f"a run makes its own: give functools.partial(torch.optim.{name}, lr=...)"
    require(not isinstance(optimizer, Optimizer), key, f"a {name} of a model's weights", remedy)
