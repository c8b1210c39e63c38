"""What simple answers make of the server's labels alone: those that a federation has to beat."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from lightning_fedssl import sampling
from lightning_fedssl.callbacks.answer import Candidate
from lightning_fedssl.models.head import MOST_VALUES

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fedssl.data import FederatedDataModule


def largest_class(data: FederatedDataModule) -> Candidate:
    """Always the largest class of the server's labels.

    Where several are largest, as in labels that were collected class by class, nobody knows which
    it is: then it is that of the test samples, as what to compare with.

    Args:
        data: The data of a run, set up, with labels at the server.
    """
    counts = data.local_data(sampling.SERVER, 1).labels.cpu().bincount(minlength=data.num_classes)
    tested = data.test_labels.cpu()
    is_known = int((counts == counts.max()).sum()) == 1
    largest = (counts if is_known else tested.bincount()).argmax()
    return Candidate("largest class", largest.expand(len(tested)), exported=False)


def trees(data: FederatedDataModule) -> list[Candidate]:
    """Extra trees on the server's labels, which are shown and not exported.

    Args:
        data: The data of a run, set up, with labels at the server.

    Returns:
        None for more than :data:`~lightning_fedssl.models.head.MOST_VALUES` numbers.
    """
    server_data = data.local_data(sampling.SERVER, 1)
    labels = server_data.labels.cpu()
    if len(labels) * math.prod(data.in_shape) > MOST_VALUES:
        return []
    from sklearn.ensemble import ExtraTreesClassifier

    rows = _rows(server_data.plain(server_data.labeled))
    tested = torch.cat([x for x, _ in data.evaluation_batches("test")])
    fitted = ExtraTreesClassifier(100, random_state=0).fit(rows, labels)
    return [
        Candidate("trees", torch.from_numpy(fitted.predict(_rows(tested))), None, exported=False)
    ]


def _rows(samples: Tensor) -> NDArray[Any]:
    return samples.detach().flatten(1).float().cpu().numpy()
