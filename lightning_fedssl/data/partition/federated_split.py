"""The partition of the training images as a value, which has a hash and can be saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedssl.data.partition.index_lists import ClientIndices as ClientIndices
from lightning_fedssl.data.partition.index_lists import ClientList
from lightning_fedssl.storage.files import replace_file

LabelLocation = Literal["server", "clients"]


@dataclass(frozen=True, eq=False)
class SplitRequest:
    """The input of a partition.

    Attributes:
        labels: Labels of all training images, int64 ``(N,)``; -1 marks an image that is held out of
            the federation.
        num_classes: Number of classes, K.
        num_clients: Number of clients, M.
        num_labels: Number of labelled images in the federation, or ``"all"``.
        label_location: Where the labelled images are.
        seed: The seed to note in the split.
        client_ids: The natural client of every training image, int64 ``(N,)``; None if the data
            have none.
        without_label: Indices of the images that have no label at all, int64 ``(n,)``; only clients
            get them. Their entries in ``labels`` are -1.
    """

    labels: Tensor
    num_classes: int
    num_clients: int
    num_labels: int | Literal["all"]
    label_location: LabelLocation
    seed: int = 0
    client_ids: Tensor | None = None
    without_label: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def in_federation(self) -> Tensor:
        """Which images are to be assigned, ``(N,)`` bool: the others are held out."""
        return (self.labels >= 0).index_fill(0, self.without_label, True)


@dataclass(frozen=True, eq=False)
class FederatedSplit:
    """The partition of the training images.

    Attributes:
        seed: The seed that the split was drawn with.
        server_labeled: Indices of the server's labelled images, int64 ``(labelled,)``.
        clients: The images of every client.
    """

    seed: int
    server_labeled: Tensor
    clients: Sequence[ClientIndices]

    @cached_property
    def client_list(self) -> ClientList:
        """The images of every client, end to end in two tensors."""
        return ClientList.from_clients(self.clients)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over seed and indices; equal for equal splits."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes the split as JSON with the keys ``seed``, ``server_labeled``, ``clients`` and
        ``hash``.

        Args:
            path: The file; it is replaced atomically, so that a reader never sees an incomplete
                file.
        """
        text = json.dumps({**self._content(), "hash": self.hash})
        replace_file(Path(path), lambda new: new.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, path: str | Path) -> FederatedSplit:
        """Reads a split that :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is not a split, or its content does not fit its hash.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"partition file {str(path)!r} does not exist; give the partition.json of a run"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            server = _index_tensor(content["server_labeled"])
            clients = []
            for one in content["clients"]:
                labeled = _index_tensor(one["labeled"])
                clients.append(ClientIndices(labeled, _index_tensor(one["unlabeled"])))
            split = cls(int(content["seed"]), server, clients)
            stored_hash = content["hash"]
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"partition file {str(path)!r} is not a partition ({type(error).__name__}: {error})"
            ) from error
        if split.hash != stored_hash:
            raise ValueError(
                f"partition file {str(path)!r} was changed: its content does not fit its hash"
            )
        return split

    def _content(self) -> dict[str, Any]:
        clients = []
        client_list = self.client_list
        for lists in zip(client_list.labeled.tolist(), client_list.unlabeled.tolist(), strict=True):
            clients.append(dict(zip(ClientIndices._fields, lists, strict=True)))
        return {
            "seed": self.seed,
            "server_labeled": self.server_labeled.tolist(),
            "clients": clients,
        }


def _index_tensor(values: Any) -> Tensor:
    if (
        not isinstance(values, list)
        or not {*map(type, values)} <= {int}
        or min(values, default=0) < 0
    ):
        raise TypeError("indices must be a list of integers from 0")
    return torch.tensor(values, dtype=torch.int64)
