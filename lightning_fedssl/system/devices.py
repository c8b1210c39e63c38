"""The simulated time of a round on real devices: seconds of computing and sending, from the run's
steps and bytes.

Z. Sun et al., "Efficient Semi-Supervised Federated Learning for Heterogeneous Participants", arXiv
2307.15870, section V-C, describes the model: the time of a local step is normally distributed, with
mean and deviation of the client's device; bandwidths change, from 10 to 20 Mbit/s for downloads and
from 2 to 8 Mbit/s for uploads; a round is synchronous. The devices' times are not published.

A device's seconds are those of a plain step: ``data.client_batch_size`` images pass through the
network, forward and backward. A method's own step takes as many times longer as it has more
operations (:func:`lightning_fedssl.local_training.step_work.step_work`).

A client's time in a round is the sum of the times of its downloads, its steps and its uploads. The
round takes as long as the slowest client. In split training, which exchanges features at every
step, the sum is over all steps of the round, although in reality each step waits for all clients.
So the simulated time of such a round is a lower bound.

Every draw is a function of (seed, round, client), so nothing needs to be saved and ranks agree.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from itertools import accumulate
from operator import add

from lightning_fedssl import sampling

MEGABIT = 1e6 / 8
"""Bytes."""


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        name: Its name.
        seconds: Mean seconds of a plain step.
        std: Standard deviation of these seconds; steps are independent.
        share: Its relative frequency among the clients.
    """

    name: str
    seconds: float
    std: float = 0.0
    share: float = 1.0


@dataclass
class Usage:
    """What a client does in a round.

    Attributes:
        down: Bytes it receives.
        up: Bytes it sends.
        steps: Training steps.
        work: What they compute, in plain steps.
    """

    down: int = 0
    up: int = 0
    steps: int = 0
    work: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Duration:
    """Seconds of a client, or of the slowest client of a round.

    Attributes:
        compute: Of training.
        transfer: Of sending and receiving.
        server: Of the server's training, as far as clients wait for it.
    """

    compute: float = 0.0
    transfer: float = 0.0
    server: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.compute + self.transfer + self.server


class SystemModel:
    """How fast devices and links of the simulated federation are.

    Args:
        devices: The kinds of devices; each client's device is drawn at random by the seed.
        download_mbit_s: Smallest and largest download rate of a client, in megabits per second;
            drawn for every client and round.
        upload_mbit_s: Smallest and largest upload rate of a client, in megabits per second.
        server_step_s: Seconds of a training step of the server; its links cost nothing.

    Example:
        >>> system = SystemModel([Device("phone", seconds=0.5)], upload_mbit_s=(8, 8))
        >>> system.client_duration(0, 1, 0, Usage(steps=4, work=4, up=2_000_000)).total
        4.0
    """

    def __init__(
        self,
        devices: list[Device],
        download_mbit_s: tuple[float, float] = (10.0, 20.0),
        upload_mbit_s: tuple[float, float] = (2.0, 8.0),
        server_step_s: float = 0.0,
    ) -> None:
        if not devices:
            raise ValueError(
                "trainer.system.devices is empty: give at least one device, with name and seconds"
            )
        for device in devices:
            if not (device.seconds > 0 and device.std >= 0 and device.share > 0):
                raise ValueError(
                    f"trainer.system.devices: {device.name} has seconds {device.seconds}, std "
                    f"{device.std}, share {device.share}: seconds and share must be above 0, std 0 "
                    "or more"
                )
        for key, (low, high) in {
            "download_mbit_s": download_mbit_s,
            "upload_mbit_s": upload_mbit_s,
        }.items():
            if not 0 < low <= high:
                raise ValueError(
                    f"trainer.system.{key} is [{low}, {high}]: give two rates above 0, the lower "
                    "one first"
                )
        if not server_step_s >= 0:
            raise ValueError(
                f"trainer.system.server_step_s is {server_step_s}: give 0 (not counted) or more"
            )
        self.devices = devices
        self.download_mbit_s = download_mbit_s
        self.upload_mbit_s = upload_mbit_s
        self.server_step_s = server_step_s

    def device_of(self, seed: int, client: int) -> Device:
        """The device of a client, the same in all rounds."""
        shares = [device.share for device in self.devices]
        place = sampling.rng(seed, "device", client).random() * sum(shares)
        return self.devices[bisect([*accumulate(shares)][:-1], place)]

    def rates(self, seed: int, round_index: int, client: int) -> tuple[float, float]:
        """The download and upload rate of a client in a round, in megabits per second."""
        low, high = zip(self.download_mbit_s, self.upload_mbit_s, strict=True)
        generator = sampling.rng(seed, "bandwidth", round_index, client)
        down, up = generator.uniform(low, high).tolist()
        return down, up

    def compute_seconds(self, seed: int, round_index: int, client: int, steps: float) -> float:
        """Seconds for a number of plain steps: a sum of independent normal draws, at least 0."""
        device = self.device_of(seed, client)
        normal = sampling.rng(seed, "compute", round_index, client).standard_normal()
        return max(0.0, steps * device.seconds + math.sqrt(steps) * device.std * float(normal))

    def client_duration(self, seed: int, round_index: int, client: int, usage: Usage) -> Duration:
        """The time of one client in a round.

        Args:
            seed: The run's seed.
            round_index: The round.
            client: The client.
            usage: What it does.
        """
        down, up = self.rates(seed, round_index, client)
        transfer = usage.down / (down * MEGABIT) + usage.up / (up * MEGABIT)
        return Duration(self.compute_seconds(seed, round_index, client, usage.work), transfer)

    def round_duration(
        self,
        seed: int,
        round_index: int,
        usages: Mapping[int, Usage],
        server_steps: int = 0,
        *,
        server_in_parallel: bool = False,
        left_out: Collection[int] = (),
    ) -> Duration:
        """The time of a round: that of its slowest client and of the server.

        Args:
            seed: The run's seed.
            round_index: The round.
            usages: What each client does; also those that only received something.
            server_steps: Training steps of the server.
            server_in_parallel: The server trains while the clients do; else they wait for it.
            left_out: Clients that the server does not wait for: they dropped out.
        """
        durations = [
            self.client_duration(seed, round_index, k, usage)
            for k, usage in sorted(usages.items())
            if k not in left_out
        ]
        slowest = max(durations, key=lambda duration: duration.total, default=Duration())
        server = server_steps * self.server_step_s
        if server_in_parallel:
            server = max(0.0, server - slowest.total)
        return Duration(slowest.compute, slowest.transfer, server)
