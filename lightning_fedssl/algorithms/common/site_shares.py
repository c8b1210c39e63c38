"""How clients use what they have stated of their classes (``data.class_shares``)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.class_shares import doubted_shares, shift_to_shares

KEPT = "class shares"
"""The kind of client state that holds shares which are not exact."""

_PASS = 250
"""Images per forward pass."""


def shifted(algorithm: FederatedAlgorithm, data: LocalData, logits: Tensor) -> Tensor:
    """Logits whose mean probabilities are the client's shares; unchanged if it has stated none.

    Shares that are not exact are corrected once, by what the first model that the client receives
    predicts, and then kept. If they were corrected in every round, each round would pull the model
    further towards them, and in the end it would have their whole error.

    Args:
        algorithm: Has the client's state.
        data: The client's.
        logits: Of all its unlabelled samples, ``(n, classes)``.
    """
    if data.shares is None or not len(logits):
        return logits
    state = algorithm.clients.get(data.party, KEPT)
    if not state:
        state = {"shares": doubted_shares(logits, *data.shares)}
        if data.shares.sureness < 1:
            algorithm.clients.put(data.party, KEPT, state)
    return logits + shift_to_shares(logits, state["shares"])


@torch.no_grad()
def received_shift(algorithm: FederatedAlgorithm, data: LocalData) -> Tensor | None:
    """What is added to the logits of a client's batches in a round, ``(classes,)``; None without
    stated shares.

    A batch is too small to be compared with the shares, so the shift is that of all the client's
    unlabelled images by the model that it has received, in evaluation mode, in the plain view.

    Args:
        algorithm: The working module, which holds the received model.
        data: The client's.
    """
    if data.shares is None or not len(data.unlabeled):
        return None
    with evaluating(algorithm):
        logits = torch.cat([algorithm(data.plain(part)) for part in data.unlabeled.split(_PASS)])
    return shifted(algorithm, data, logits)[0] - logits[0]
