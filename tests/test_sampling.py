import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedssl import sampling


def splitmix_finaliser(z: int) -> int:
    """The published constants in plain integers (Steele, Lea, Flood, OOPSLA 2014)."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_tensor_hash_is_splitmix() -> None:
    numbers = [0, 1, -1, -5, 2**62, -(2**63), 123456789012345]
    mixed = sampling._mix(torch.tensor(numbers)).tolist()
    assert [z % 2**64 for z in mixed] == [splitmix_finaliser(z % 2**64) for z in numbers]


def test_keys_depend_on_every_part_and_on_nothing_else() -> None:
    keys = {sampling.derive_key(s, p, r, c) for s in (0, 1) for p in "ab" for r in (1, 2) for c in (0, 12)}
    assert len(keys) == 16
    torch.manual_seed(1)
    np.random.seed(1)
    before = sampling.derive_key(0, "a", 1, 2)
    torch.manual_seed(2)
    assert sampling.derive_key(0, "a", 1, 2) == before
    assert sampling.derive_key(0, "a", 1, 12) != sampling.derive_key(0, "a", 11, 2)


def test_uniform_is_uniform_and_independent() -> None:
    numbers = sampling.uniform(sampling.sample_keys(sampling.derive_key(3, "x"), 20_000), 3).numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03


def test_an_epoch_made_in_parts_is_the_epoch_made_at_once() -> None:
    key = sampling.derive_key(0, "views")
    whole = sampling.sample_keys(key, 10)
    parts = [sampling.sample_keys(key, 4), sampling.sample_keys(key, 6, start=4)]
    assert torch.equal(torch.cat(parts), whole)


def test_more_draws_keep_the_first_ones() -> None:
    keys = sampling.sample_keys(5, 7)
    assert torch.equal(sampling.uniform(keys, 9)[:, :4], sampling.uniform(keys, 4))


def test_cohort_is_a_sample_without_replacement_that_changes_with_the_round() -> None:
    drawn = [sampling.cohort(0, r, 100, 10) for r in range(1, 200)]
    assert all(len(set(clients)) == 10 for clients in drawn)
    assert drawn[0] != drawn[1]
    assert sampling.cohort(0, 1, 100, 10) == drawn[0]
    counts = np.bincount([c for clients in drawn for c in clients], minlength=100)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert sorted(sampling.cohort(0, 1, 5, 5)) == [0, 1, 2, 3, 4]


def test_global_seed_follows_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert sampling.global_seed() == 7
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert sampling.global_seed() == 0


def test_permutation_visits_everything_once_and_leaves_the_global_state() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    order = sampling.permutation(50, 0, "shuffle", 1, 2, 3)
    assert sorted(order.tolist()) == list(range(50))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(order, sampling.permutation(50, 0, "shuffle", 1, 2, 4))


def test_shares_are_balanced_complete_and_in_the_cohorts_order() -> None:
    sizes = [90, 10, 50, 40, 0, 60]
    assert sampling.share_out([[3], [0], [5], [2]], sizes, 2) == [[[3], [0]], [[5], [2]]]
    assert sampling.share_out([[4], [3], [1]], sizes, 1) == [[[4], [3], [1]]]
    shares = sampling.share_out([[client] for client in range(6)], sizes, 3)
    assert sorted(client for share in shares for [client] in share) == list(range(6))
    assert max(sum(sizes[c] for [c] in share) for share in shares) == 90
    assert sampling.share_out([[1]], sizes, 3) == [[[1]], [], []]
    assert sampling.share_out([[1, 4], [0], [2, 3]], sizes, 2) == [[[1, 4], [0]], [[2, 3]]]  # 11, 90 and 90 images


@pytest.mark.parametrize(
    ("count", "largest", "lengths"), [(7, 3, [3, 2, 2]), (6, 3, [3, 3]), (2, 5, [2]), (3, 1, [1, 1, 1]), (0, 4, [])]
)
def test_parts_are_few_consecutive_and_equally_long(count: int, largest: int, lengths: list[int]) -> None:
    parts = sampling.equal_parts(range(count), largest)
    assert [len(part) for part in parts] == lengths
    assert [item for part in parts for item in part] == list(range(count))
