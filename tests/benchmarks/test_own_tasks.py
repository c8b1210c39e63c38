import numpy as np
import pytest

from benchmarks.own_tasks import NAMES, make_task


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_a_function_of_name_and_seed_and_has_all_classes_and_clients(name: str) -> None:
    task, again, other = (make_task(name, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(task.arrays[part], again.arrays[part]) for part in task.arrays)
    assert not np.array_equal(task.arrays["train"], other.arrays["train"])
    for part in ("train", "test"):
        classes = np.unique(task.arrays[f"{part}_labels"])
        assert classes.tolist() == list(range(len(classes)))
    assert len(np.unique(task.arrays["client_ids"])) == task.keys["data.num_clients"]
