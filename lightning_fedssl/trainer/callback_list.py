"""The callbacks of a run: which are supported, in which order they are called, and which override a
hook.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.hooks import hooks_of, overrides
from lightning_fedssl.interop.lightning_names import WRITERS
from lightning_fedssl.storage.other_names import OTHER_NAMES
from lightning_fedssl.updates.rule import UpdateRule

_log = logging.getLogger(__name__)

SUPPORTED_LIGHTNING_CALLBACKS = (
    EarlyStopping,
    ModelCheckpoint,
    Timer,
    LambdaCallback,
    SaveConfigCallback,
)
"""Lightning's own callbacks that run here, with a round as the epoch; others of Lightning's are
refused by name."""

REPLACED_LIGHTNING_CALLBACKS: dict[type[Callback], str] = {
    LearningRateMonitor: "every round logs the learning rate as lr",
    ProgressBar: "trainer.enable_progress_bar shows the progress",
    ModelSummary: "TensorBoard's tab Text has the configuration, and print(model.network) shows "
    "the layers",
    OnExceptionCheckpoint: "last.ckpt is of the last whole round: --ckpt_path last continues there",
    ThroughputMonitor: "every round logs time/round_s and time/client_samples_per_s",
}
"""Lightning's callbacks that are accepted and left out, with what does their work here; subclasses
included."""

LIGHTNING_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
)
"""Those of Lightning's hooks that a federated run calls,
in addition to ``setup`` and ``teardown``.
"""


def as_list(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """One callback, several or none as a list."""
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])


def usable(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks of a user that run: without those that something replaces, which are logged.

    Args:
        callbacks: As the user gave them.

    Raises:
        ValueError: See :func:`refuse_unsupported`.
    """
    chosen = []
    for callback in callbacks:
        for replaced, replacement in REPLACED_LIGHTNING_CALLBACKS.items():
            if isinstance(callback, replaced):
                name = type(callback).__name__
                _log.warning("trainer.callbacks: %s is left out: %s", name, replacement)
                break
        else:
            chosen.append(callback)
    refuse_unsupported(chosen)
    return chosen


def refuse_unsupported(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks of Lightning that cannot work here, hooks that do not exist, and checkpoints
    of the same names.

    Raises:
        ValueError: Naming the callback and those that can be used, or the hook and the one that was
            meant.
    """
    writers = [callback for callback in callbacks if isinstance(callback, FederatedCheckpoint)]
    if len({writer.folder for writer in writers}) < len(writers):
        raise ValueError(
            "trainer.callbacks: two FederatedCheckpoint would write the same last.ckpt and "
            "best.ckpt; keep one, and add Lightning's ModelCheckpoint for another scalar"
        )
    saving = Counter(c.state_key for c in callbacks if _has_state(c))
    if twice := [c for c in callbacks if saving[c.state_key] > 1]:
        raise ValueError(
            f"trainer.callbacks: two {type(twice[0]).__name__} would save their states under one "
            "name, and a resumed run would mix them up; keep one, or give the class a state_key "
            "that differs"
        )
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and not callback.every_n_epochs:
            raise ValueError(
                "trainer.callbacks: ModelCheckpoint saves by rounds here, not by steps or time: "
                "give every_n_epochs"
            )
        is_supported = isinstance(callback, (FederatedCallback, *SUPPORTED_LIGHTNING_CALLBACKS))
        if not is_supported and type(callback).__module__.startswith(
            ("lightning.", "pytorch_lightning.")
        ):
            name = type(callback).__name__
            raise ValueError(
                f"trainer.callbacks: {name} needs Lightning's own training loop and cannot run in "
                f"a federated one; {OTHER_NAMES.get(name, 'leave it out')}; of Lightning's "
                "callbacks these can: "
                + ", ".join(c.__name__ for c in SUPPORTED_LIGHTNING_CALLBACKS[:-1])
            )
        if not is_supported or isinstance(callback, FederatedCallback):
            _check_hooks(callback)


def check_monitors(
    callbacks: Iterable[Callback], scalars: Collection[str], place: str = ""
) -> None:
    """Refuse callbacks whose monitor is not a scalar of the run.

    Args:
        callbacks: Those whose monitors are checked.
        scalars: The scalars of the run.
        place: What the monitors that are checked begin with; others pass.

    Raises:
        ValueError: Names the callback and the scalar that was meant.
    """
    for callback in callbacks:
        name = getattr(callback, "monitor", None)
        if not (name and name.startswith(place) and getattr(callback, "strict", True)):
            continue
        if not {name, name.partition("/class_")[0]} & {*scalars}:
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} has monitor {name}, and no round "
                "logs it; did you mean "
                + ", ".join(difflib.get_close_matches(name, scalars, n=1) or sorted(scalars))
                + ("?" if scalars else "to give data.validation?")
            )


def _has_state(callback: Callback) -> bool:
    """Whether a checkpoint holds something of a callback."""
    none = (Callback.state_dict, FederatedCallback.state_dict)
    return type(callback).state_dict not in none or bool(getattr(callback, "saved", ()))


def _check_hooks(callback: Callback) -> None:
    """Refuse a hook that is misspelt; warn of Lightning's hooks that are never called here."""
    class_name = type(callback).__name__
    base = UpdateRule if isinstance(callback, UpdateRule) else FederatedCallback
    for name in hooks_of(type(callback)):
        if not hasattr(base, name):
            meant = difflib.get_close_matches(name, hooks_of(base), 1)
            raise ValueError(
                f"trainer.callbacks: {class_name} has a method {name}, and there is no hook of "
                "that name"
                + (f"; did you mean {meant[0]}?" if meant else "; see lightning_fedssl.callback")
            )
        if (
            name not in LIGHTNING_HOOKS
            and hasattr(Callback, name)
            and overrides(callback, name, base)
        ):
            _log.warning(
                "callback %s overrides %s, which a federated run never calls", class_name, name
            )


def choose(*groups: Iterable[Callback]) -> list[Callback]:
    """All callbacks of these groups, except those of a class that an earlier callback already has.

    Callbacks that write checkpoints come last, so that a checkpoint holds what the others did at
    the end of the round.

    Args:
        groups: E.g. the user's callbacks, those that the algorithm needs, and the defaults.
    """
    first, *others = groups
    chosen = list(first)
    for callback in chain.from_iterable(others):
        if not any(isinstance(other, type(callback)) for other in chosen):
            chosen.append(callback)
    return sorted(chosen, key=lambda callback: isinstance(callback, WRITERS))
