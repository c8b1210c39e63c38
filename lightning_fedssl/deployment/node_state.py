"""What a node stores of a client between rounds, in files that survive a restart of the node."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import safetensors
import safetensors.torch

from lightning_fedssl.deployment.messages import Content, MessageError
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.storage.files import write_synced

_log = logging.getLogger(__name__)

_NAME = re.compile(r"round-(?P<round>\d+)\.(?P<what>state|received|reply-\w+)\.safetensors")


class ClientFolder:
    """The folder of one client of one run.

    A client's state after a round counts only if the server has accepted the update of that round, which the client
    learns from its next message. So the folder has the states after the last accepted round and after the last round,
    and what the client received in these rounds. It also has the client's replies of the last round, because a reply
    can be lost on its way: a message that the server repeats gets the same reply, and the client trains once.

    Args:
        path: The folder; it is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def has_round(self, round_index: int) -> bool:
        """Whether the state after a round, and what the client received in it, are here; round 0 has neither."""
        return not round_index or all(self._file(round_index, what).is_file() for what in ("state", "received"))

    def can_read_round(self, round_index: int) -> bool:
        """Whether the files of a round are here and none of them is damaged."""
        if not self.has_round(round_index):
            return False
        try:
            for what in ("state", "received") if round_index else ():
                _read(self._file(round_index, what))
        except MessageError:
            return False
        return True

    def begin(self, accepted: int, keep: int = 0) -> State:
        """The client's state after the last accepted round; files of other rounds are removed, and those half written.

        Args:
            accepted: That round; 0 for none.
            keep: A further round whose files stay.

        Raises:
            MessageError: If the server has accepted a round whose state is not here.
        """
        for round_index, what, file in list(self._files()):
            needed = (keep,) if what.startswith("reply") else (accepted, keep)
            if round_index not in needed:
                file.unlink(missing_ok=True)
        if not accepted:
            return {}
        if not self.has_round(accepted):
            raise MessageError(
                f"has no state after round {accepted}: restore the state-dir of its node, or start the SuperNode with "
                "fresh-start=true in its --node-config, and the client begins again without a state"
            )
        return _read(self._file(accepted, "state"))

    def received(self, round_index: int) -> State:
        """What the client received in a round; empty if that is not here."""
        file = self._file(round_index, "received")
        return _read(file) if file.is_file() else {}

    def save_received(self, round_index: int, received: State) -> None:
        """Store what the client received in a round."""
        self._write(self._file(round_index, "received"), received)

    def save_state(self, round_index: int, state: State) -> None:
        """Store the client's state after a round, also if it is empty; it is on the disk when this returns."""
        self._write(self._file(round_index, "state"), state)

    def newest_round(self) -> int:
        """The last round of which there is a file; 0 for none."""
        return max((round_index for round_index, _, _ in self._files()), default=0)

    def reply(self, round_index: int, request: str) -> Content | None:
        """The reply to a message; None if there is none.

        Args:
            round_index: The round of the message.
            request: The digest of the message.
        """
        file = self._file(round_index, f"reply-{request}")
        if not file.is_file():
            return None
        tensors, metadata = _read_all(file)
        metrics = {name: (total, weight) for name, (total, weight) in json.loads(metadata["metrics"]).items()}
        return Content(tensors, json.loads(metadata["values"]), metrics)

    def save_reply(self, round_index: int, request: str, reply: Content) -> None:
        """Store the reply to a message of a round, whose digest is ``request``."""
        metadata = {"values": json.dumps(dict(reply.values)), "metrics": json.dumps(dict(reply.metrics))}
        self._write(self._file(round_index, f"reply-{request}"), reply.tensors, metadata)

    def weights(self) -> State:
        """The weights that the client has downloaded for a measurement of batch-norm statistics.

        Empty if there are none, or if the file is damaged: the client then requests them again.
        """
        file = self.path / "weights.safetensors"
        try:
            return _read(file) if file.is_file() else {}
        except MessageError:
            _log.warning("%s is damaged: the weights are requested again", file)
            return {}

    def save_weights(self, weights: State) -> None:
        """Store the weights of a measurement of batch-norm statistics."""
        self._write(self.path / "weights.safetensors", weights)

    def _file(self, round_index: int, what: str) -> Path:
        return self.path / f"round-{round_index}.{what}.safetensors"

    def _files(self) -> Iterator[tuple[int, str, Path]]:
        """The files of rounds: the round, what the file has, and its path."""
        for file in self.path.iterdir():
            if match := _NAME.fullmatch(file.name):
                yield int(match["round"]), match["what"], file

    @staticmethod
    def _write(path: Path, tensors: State, metadata: dict[str, str] | None = None) -> None:
        separate = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}  # no shared memory
        content = safetensors.torch.save(separate, metadata)
        write_synced(path, lambda file: file.write(content))


def _read(path: Path) -> State:
    return _read_all(path)[0]


def _read_all(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata of a file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            # Copies, as the tensors of an open file are its memory, and the file may be removed.
            return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}
    except (safetensors.SafetensorError, ValueError) as error:
        raise MessageError(
            f"has a damaged file {path.name}: restore it in the state-dir of its node, or start the SuperNode with "
            "fresh-start=true in its --node-config"
        ) from error
