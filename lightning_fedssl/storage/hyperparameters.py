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

    Example:
        >>> from lightning_fedssl import CNN, FedAvg, hyperparameters
        >>> @hyperparameters
        ... class Clipped(FedAvg):
        ...     client_epochs: float = 5
        ...     bound: float = 0.1
        >>> Clipped(network=CNN, bound=0.2, prox_mu=0.01).bound
        0.2
    """
    made: Any = method
    apart = inspect.signature(made.__post_init__).parameters
    known = {"self": Parameter("self", Parameter.POSITIONAL_ONLY)}
    for name, kind in inspect.get_annotations(made, eval_str=True).items():
        if getattr(kind, "__origin__", None) is not ClassVar:
            default = vars(made).get(name, Parameter.empty)
            kind = kind.type if isinstance(kind, InitVar) else kind
            known[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            if name in apart and name in vars(made):
                delattr(made, name)  # it would hide an attribute of a base class
    for name, parameter in inspect.signature(super(made, made).__init__).parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            known.setdefault(name, parameter)
    signature = inspect.Signature([*known.values()])

    def __init__(self: Any, **given: Any) -> None:  # noqa: N807
        bound = signature.bind(self, **given)
        bound.apply_defaults()
        values = bound.arguments
        del values["self"]
        for name in values.keys() - apart.keys():
            default = known[name].default
            if getattr(type(self), name, default) is not default:
                raise TypeError(
                    f"{type(self).__name__}.{name} does not change the default of {name}: write "
                    f"{name} with its type, as in a dataclass, and @hyperparameters before class"
                )
            vars(self)[name] = values[name]
        self.__post_init__(**{name: values[name] for name in values if name in apart})
        # What the command line has given, or an __init__ of a derived class, and then the others.
        self.save_hyperparameters()
        for name, value in values.items():
            self.hparams.setdefault(name, value)
        if isinstance(self.hparams["network"], str):  # a function that the command line names
            self.hparams["network"] = values["network"]

    made.__init__ = __init__
    made.__init__.__signature__ = signature
    made.__init__.__annotations__ = {name: known[name].annotation for name in known}
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


def require_factory(key: str, given: object) -> None:
    """Refuse an optimizer where a function that makes one is needed.

    Args:
        key: The name of the argument.
        given: Its value.

    Raises:
        ValueError: Names the key.
    """
    name = type(given).__name__
    remedy = f"a run makes its own: give functools.partial(torch.optim.{name}, lr=...)"
    require(not isinstance(given, Optimizer), key, f"a {name} of a model's weights", remedy)
