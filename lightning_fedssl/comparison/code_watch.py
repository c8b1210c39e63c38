"""Notices that code changes while a comparison trains, so that no result is stored under the hash of other code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_fedssl.comparison.code_version import code_version
from lightning_fedssl.comparison.plan import Run


class CodeWatch:
    """Compares the code of a run that is about to start with the code for which it was planned.

    Args:
        say: Called with one line, when the code of a run has changed for the first time.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False

    def current(self, run: Run) -> Run:
        """The run; with the hash and the folder of the present code, if that has changed.

        Args:
            run: A run, as it was planned.
        """
        code = code_version(run.resolved.config, type(run.resolved.datamodule))
        if code == run.code:
            return run
        if not self._said:
            self._say(
                "the code has changed since the comparison began: runs that start now are stored under its new hash "
                "(column code of results.csv); run the same command again to train the others with it"
            )
        self._said = True
        name = f"{run.folder.name.rpartition('_')[0]}_{code[:8]}"
        return replace(run, code=code, folder=run.folder.with_name(name))
