"""The hooks of a run: which callbacks override which, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from lightning_fedssl.algorithm import FederatedAlgorithm

StepEnded = Callable[[int], object]
"""Is called with the number of a step that has been made, from 0."""

Call = tuple[str, tuple[Any, ...]]
"""A hook and its arguments behind the algorithm."""


class Hooks:
    """Calls the callbacks of a run, in their order.

    Args:
        callbacks: The callbacks.
        base: The class that defines the hooks; Lightning's own callbacks do not derive from it.
        trainer: What their hooks get first.
        algorithm: What they get second; Lightning's own callbacks get its ``lightning_module``.

    Attributes:
        callbacks: The callbacks.
        listeners: By the name of each hook, the callbacks that override it.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        base: type[Callback],
        trainer: Any,
        algorithm: FederatedAlgorithm | None = None,
    ) -> None:
        self.callbacks = list(callbacks)
        self.base = base
        self.trainer = trainer
        self.algorithm = algorithm
        self.listeners: dict[str, list[Callback]] = {}
        for hook in ("setup", "teardown", *hooks_of(base)):
            self.listeners[hook] = [c for c in callbacks if overrides(c, hook, base)]

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of the callbacks that override it.

        Args:
            hook: Its name.
            arguments: Those behind the trainer and the algorithm.
        """
        for callback in self.listeners[hook]:
            self._notify(callback, hook, *arguments)

    def after_steps(self, hook: str) -> StepEnded | None:
        """What calls a hook with the number of a step; None if no callback overrides it.

        Args:
            hook: Its name.
        """
        return partial(self.call, hook) if self.listeners[hook] else None

    def call_in_turn(self, calls: Sequence[Call], last: tuple[type[Callback], ...]) -> None:
        """Call several hooks of most callbacks, and then the same hooks of those that come last.

        Args:
            calls: The hooks in order.
            last: Classes of callbacks.
        """
        for is_last in (False, True):
            for hook, arguments in calls:
                for callback in self.listeners[hook]:
                    if isinstance(callback, last) is is_last:
                        self._notify(callback, hook, *arguments)

    def _notify(self, callback: Callback, hook: str, *arguments: Any) -> None:
        module: Any = self.algorithm
        if not isinstance(callback, self.base):
            module = module.lightning_module
        getattr(callback, hook)(self.trainer, module, *arguments)


def hooks_of(kind: type) -> list[str]:
    """The names of the hooks that a class of callbacks has."""
    return [name for name in dir(kind) if name.startswith("on_")]


def overrides(callback: Callback, hook: str, base: type[Callback]) -> bool:
    """Whether a callback overrides a hook, in its class or on the instance.

    It need not derive from the class that defines the hooks.

    Raises:
        AttributeError: If there is no hook of that name.
    """
    no_ops = {getattr(base, hook), getattr(Callback, hook, None)}
    method = getattr(callback, hook, None)
    return method is not None and getattr(method, "__func__", method) not in no_ops
