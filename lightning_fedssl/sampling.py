"""Random streams as functions of (seed, round, party, purpose), and the plans drawn from them.

Nothing here reads or changes a global random state. So a resumed run needs no generator state, any
number of ranks draws the same numbers, and a client draws the same numbers whether clients train
sequentially or stacked. A party is the server or a client. Two kinds of stream:

* :func:`rng`: a NumPy generator for plans made on the host (cohorts, permutations, Beta and
  Dirichlet draws);
* :func:`sample_keys` and :func:`uniform`: a counter-based integer hash in tensor operations, for
  draws per image. It is bitwise identical on CPU and GPU.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

_Item = TypeVar("_Item")

SERVER = -1
"""The party number of the server; clients are numbered from 0."""

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as signed 64 bit
_MIX_1 = -0x40A7B892E31B1A47  # the two multipliers of splitmix64 (Steele et al., OOPSLA 2014)
_MIX_2 = -0x6B2FB644ECCEEE15


def global_seed() -> int:
    """The seed given to ``seed_everything`` (or ``lightning.seed_everything``); 0 if there was
    none.
    """
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def derive_key(seed: int, *parts: int | str) -> int:
    """A 64-bit key for one purpose, as a signed integer.

    Args:
        seed: The run's seed.
        parts: What the stream is for, e.g. ``("shuffle", round, party, epoch)``.
    """
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def rng(seed: int, *parts: int | str) -> Generator:
    """A NumPy generator (Philox) for one purpose; see :func:`derive_key`."""
    return Generator(np.random.Philox(key=derive_key(seed, *parts) & (2**64 - 1)))


@contextmanager
def seeded(purpose: str) -> Iterator[None]:
    """Inside, torch's generator draws initial weights as a function of the seed; then it goes on as
    if nothing had been drawn.

    Args:
        purpose: Whose weights.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the generators of GPUs, which are not restored here.
        torch.default_generator.manual_seed(derive_key(global_seed(), purpose))
        yield


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors; products wrap, shifts are logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def sample_keys(key: int, count: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """One key per image: ``(count,)`` int64, the i-th a function of ``key`` and ``start + i``
    alone.

    Args:
        key: A key from :func:`derive_key`.
        count: Number of images.
        device: Where the keys live.
        start: Position of the first image in its epoch, so that an epoch in parts has the keys of
            the whole epoch.
    """
    return _mix(torch.arange(start, start + count, device=device) * _GOLDEN + key)


def fold_in(key: Tensor, number: int | Tensor) -> Tensor:
    """Derive a key from a key and a number, such as a step: int64, in the broadcast shape of both.

    Args:
        key: Keys, int64 of any shape.
        number: From 0.
    """
    return _mix(key + torch.as_tensor(number) * _GOLDEN)  # tensors of 64 bits wrap products


def uniform(keys: Tensor, draws: int) -> Tensor:
    """Independent uniform numbers in [0, 1) for every key.

    Args:
        keys: ``(n,)`` int64 from :func:`sample_keys`.
        draws: How many numbers each image needs.

    Returns:
        ``(n, draws)`` float32; column j depends on the key and on j alone, so more draws do not
        change the first ones.
    """
    counters = torch.arange(1, draws + 1, device=keys.device) * _GOLDEN
    bits = _mix(keys[:, None] + counters)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def cohort(seed: int, round_index: int, num_clients: int, size: int) -> list[int]:
    """The clients of one round, drawn uniformly without replacement, in drawn order.

    Args:
        seed: The run's seed.
        round_index: The round, from 1.
        num_clients: All clients, M.
        size: Clients per round, C * M.
    """
    drawn = rng(seed, "cohort", round_index).choice(num_clients, size=size, replace=False)
    return list(map(int, drawn))


def equal_parts(items: Sequence[_Item], largest: int) -> list[Sequence[_Item]]:
    """Consecutive parts of a sequence, as few as possible, whose lengths differ by 1 at most.

    Args:
        items: The sequence.
        largest: The largest length of a part, from 1.
    """
    parts = math.ceil(len(items) / largest)
    ends = [math.ceil(len(items) * part / max(parts, 1)) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def share_out(
    stacks: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int
) -> list[list[Sequence[int]]]:
    """Assign the clients of a round to the ranks: the largest stack first, each to the rank with
    the fewest images.

    Args:
        stacks: Clients that one rank trains together; of one client each where clients train one
            after another.
        sizes: Every client's number of images.
        ranks: Number of ranks.

    Returns:
        The stacks of each rank, in the given order.
    """
    images = [sum(max(sizes[client], 1) for client in stack) for stack in stacks]
    rank_of = {}
    loads = [0] * ranks
    for number in sorted(range(len(stacks)), key=lambda number: -images[number]):
        rank_of[number] = min(range(ranks), key=loads.__getitem__)
        loads[rank_of[number]] += images[number]
    return [
        [stack for number, stack in enumerate(stacks) if rank_of[number] == rank]
        for rank in range(ranks)
    ]


def permutation(count: int, seed: int, *parts: int | str) -> Tensor:
    """A random order of ``count`` items: ``(count,)`` int64 on the CPU, as
    ``rng(...).permutation(count)`` gives it.
    """
    return torch.from_numpy(rng(seed, "permutation", *parts).permutation(count))
