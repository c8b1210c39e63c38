from __future__ import annotations

import torch

from lightning_fedssl.functional.contrastive import References
from lightning_fedssl.models.memory_queue import MemoryQueue


def pushed(queue: MemoryQueue, values: list[int], confident: bool = True) -> None:
    keys = torch.tensor(values, dtype=torch.float32)[:, None]
    flags = torch.full((len(values),), confident)
    queue.push(References.all_valid(keys, torch.tensor(values), flags))


def test_queue_is_a_ring() -> None:
    queue = MemoryQueue(4, 1)
    assert not queue.references().valid.any()
    pushed(queue, [1, 2, 3])
    assert queue.references().labels.tolist() == [1, 2, 3, -1]
    assert queue.references().valid.tolist() == [True, True, True, False]
    pushed(queue, [4, 5], confident=False)
    assert queue.references().labels.tolist() == [5, 2, 3, 4]
    assert queue.references().keys.flatten().tolist() == [5, 2, 3, 4]
    assert queue.references().confident.tolist() == [False, True, True, False]
    assert queue.references(all_confident=True).confident.all()
    pushed(queue, [6, 7, 8, 9, 10, 11])  # more than it holds: the last four remain
    assert sorted(queue.references().labels.tolist()) == [8, 9, 10, 11]
    pushed(queue, [12])
    assert sorted(queue.references().labels.tolist()) == [9, 10, 11, 12]
    queue.clear()
    assert not queue.references().valid.any()
    assert queue.references(empty_count=True).valid.all()


def test_references_of_a_queue_are_not_its_storage() -> None:
    queue = MemoryQueue(2, 1)
    pushed(queue, [1, 2])
    before = queue.references()
    pushed(queue, [3, 4])
    assert before.labels.tolist() == [1, 2]
