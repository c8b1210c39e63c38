"""The command ``tune``: which ranks, threads, stacks, layout and precision train a configuration fastest on this CPU.

Each setting is tried in processes that are forked from this one, so that it cannot affect the next: one for each rank,
all at the same time. Each makes steps of the server, and of the first client of the first round that has work. The
fastest settings are then tried again with all clients of a rank stacked.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.statistics import plural
from lightning_fedssl.distributed.cpu_ranks import ranks_for, usable_cores
from lightning_fedssl.keyed_dropout import keyed
from lightning_fedssl.local_training import compatibility, vectorized
from lightning_fedssl.local_training.sequential import Loop, NoObserver
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import load_state
from lightning_fedssl.trainer import fit_loop, launch, setup
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.freed_memory import keep_freed_memory
from lightning_fedssl.trainer.processor import emulates_bfloat16
from lightning_fedssl.trainer.run import Run
from lightning_fedssl.trainer.run_folder import RunFolder

Precision = Literal["32-true", "bf16-mixed", "64-true"]

WARM_UP = 1
"""Steps before those that are timed: the first one allocates memory and chooses kernels."""
LARGEST_STACK = 256 << 20
"""The most bytes of weights that are stacked: a step needs several times as much memory."""
_NO_ANSWER = "a process with this setting died or did not answer"
_PATIENCE = 60.0
"""Seconds beyond its own after which a setting that has not answered is left out."""


class TunableTrainer(setup.ConfiguredTrainer, Protocol):
    """The keys of a trainer that this module reads and, in a process of its own, sets."""

    precision: Precision
    clients_at_once: int | Literal["auto"]
    make_federation: Callable[[Run], SimulatedFederation]

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round."""


@dataclass(frozen=True)
class Setting:
    """What is tried.

    Attributes:
        ranks: Processes that share the clients.
        threads: Threads of each.
        channels_last: The trainer's key.
        precision: The trainer's key.
        clients_at_once: The trainer's key.
    """

    ranks: int
    threads: int
    channels_last: bool
    precision: Precision
    clients_at_once: int = 1

    def options(self) -> str:
        """The options of ``fit``, after the environment variable that sets the threads."""
        keys = {
            "devices": self.ranks,
            "clients_at_once": self.clients_at_once,
            "channels_last": str(self.channels_last).lower(),
            "precision": self.precision,
        }
        return " ".join([f"OMP_NUM_THREADS={self.threads}", *(f"--trainer.{key} {v}" for key, v in keys.items())])

    def command(self, fit: str) -> str:
        """The whole command; ``fit`` is that of the same run without these options."""
        threads, options = self.options().split(" ", 1)
        return f"{threads} {fit} {options}"


@dataclass(frozen=True)
class Steps:
    """Seconds of a step, NaN where a party makes none, and steps in a round.

    Attributes:
        client: Seconds of a step of a client, its views included.
        server: Seconds of a step of the server.
        client_steps: Steps of all clients of a round.
        server_steps: Steps of the server in a round.
        all_images: No client has work with an untrained model, so every image was taken as confident.
    """

    client: float
    server: float
    client_steps: int
    server_steps: int
    all_images: bool

    def round_seconds(self, ranks: int) -> float:
        """Estimated training time of a round: the ranks share the clients, and each repeats the server's steps."""
        clients = 0.0 if math.isnan(self.client) else self.client * self.client_steps / ranks
        return clients + (0.0 if math.isnan(self.server) else self.server * self.server_steps)


@dataclass(frozen=True)
class Row:
    """A setting and what was measured with it."""

    setting: Setting
    steps: Steps

    @property
    def round_seconds(self) -> float:
        """Estimated training time of a round."""
        return self.steps.round_seconds(self.setting.ranks)


@dataclass(frozen=True)
class TuningReport:
    """The measurements of ``tune``.

    Attributes:
        rows: What was measured, in the order of the settings.
        load: The load average when it began.
        cores: Processor cores that the process may use.
        left_out: Settings that cannot train this configuration, and why.
    """

    rows: list[Row]
    load: float
    cores: int
    left_out: list[tuple[Setting, str]] = field(default_factory=list)

    def fastest(self, mixed: bool) -> Row:
        """The setting with the shortest round.

        Args:
            mixed: Among those in ``bf16-mixed``; else among the others.
        """
        return min(self._complete(mixed), key=lambda row: row.round_seconds)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        rows = [asdict(row.setting) | asdict(row.steps) | {"round_seconds": row.round_seconds} for row in self.rows]
        kinds = {"fastest": False, "fastest_bf16": True}
        best = {name: self.fastest(mixed).setting.options() for name, mixed in kinds.items() if self._complete(mixed)}
        left_out = [asdict(setting) | {"reason": reason} for setting, reason in self.left_out]
        return {"rows": rows, "left_out": left_out, "load": self.load, "cores": self.cores} | best

    def __str__(self) -> str:
        return self.text()

    def text(self, fit: str = "lightning-fedssl fit --config FILE") -> str:
        """The table, and the commands to use.

        Args:
            fit: The command that trains the measured configuration.
        """
        first = self.rows[0].steps
        lines = [
            f"a round: {first.client_steps} steps of clients, {first.server_steps} of the server; labelling and "
            "evaluation are not measured",
        ]
        if first.all_images:
            lines.append("(as if every pseudo-label passed model.threshold: with an untrained model none does)")
        head = ["ranks", "threads", "stacked", "channels last", "precision", "client step", "server step", "a round"]
        table = [head, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", *("  ".join(map(str.rjust, row, widths)) for row in table), ""]
        lines += [f"left out: {setting.options()}: {reason}" for setting, reason in self.left_out]
        exact, mixed = (self.fastest(kind) if self._complete(kind) else None for kind in (False, True))
        if exact:
            lines.append(f"fastest in {exact.setting.precision[:2]} bits (the same numbers up to rounding):")
            lines.append(f"  {exact.setting.command(fit)}")
        lines += _lines_of_bfloat16(exact, mixed, fit) if mixed else []
        if not mixed and emulates_bfloat16():
            lines.append("bfloat16 was not tried: this processor has no instructions for it (AVX512) and emulates it")
        if self.load > 0.5 * self.cores:
            busy = f"load {self.load:.1f} on {plural(self.cores, 'core')}"
            lines.append(f"other programs are running ({busy}): repeat this when they are not")
        return "\n".join(lines)

    def _complete(self, mixed: bool) -> list[Row]:
        """The rows of a kind, without those that lack a measurement that another row has."""
        wanted = [any(not math.isnan(times[part]) for times in map(_times, self.rows)) for part in (0, 1)]
        return [
            row
            for row in self.rows
            if _is_mixed(row) == mixed
            and not any(needed and math.isnan(time) for needed, time in zip(wanted, _times(row), strict=True))
        ]


def _lines_of_bfloat16(exact: Row | None, mixed: Row, fit: str) -> list[str]:
    """What the fastest setting in bfloat16 gains, and its command if it gains something."""
    gain = exact.round_seconds / mixed.round_seconds if exact else math.inf
    if gain <= 1:
        return [f"bfloat16 does not pay here: its fastest setting is {gain:.2f} times as fast"]
    factor = f" ({gain:.2f} times as fast)" if exact else ""
    return [f"fastest with bfloat16{factor}:", f"  {mixed.setting.command(fit)}"]


class LeftOutError(Exception):
    """A setting cannot train the configuration; the text is the reason."""


def _times(row: Row) -> tuple[float, float]:
    """The seconds of a step of a client and of the server; NaN for one that was not measured."""
    return row.steps.client, row.steps.server


def _cells(row: Row) -> list[str]:
    setting, steps = row.setting, row.steps
    times = [_readable(s) if s == s else "-" for s in (steps.client, steps.server)]
    layout = "yes" if setting.channels_last else "no"
    counts = map(str, (setting.ranks, setting.threads, setting.clients_at_once))
    return [*counts, layout, setting.precision, *times, _readable(row.round_seconds)]


def _readable(seconds: float) -> str:
    """Three digits of a time."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def settings_to_try(cores: int, clients: int, exact: Precision = "32-true") -> list[Setting]:
    """One rank with one thread, one rank with a thread for each core, a rank for each core; each in four ways.

    On a processor that emulates bfloat16 each in two ways: a step in ``bf16-mixed`` would take seconds there.

    Args:
        cores: Processor cores.
        clients: Clients of a round; there are no more ranks.
        exact: The precision of the configuration, if it is not ``bf16-mixed``.
    """
    plans = dict.fromkeys([(1, 1), (ranks_for(cores, 1, clients), 1), (1, cores)])
    precisions: list[Precision] = [exact] if emulates_bfloat16() else [exact, "bf16-mixed"]
    kinds = product(plans, precisions, [False, True])
    return [Setting(ranks, threads, last, precision) for (ranks, threads), precision, last in kinds]


def tune(
    trainer: TunableTrainer, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, seconds: float
) -> TuningReport:
    """Measure all settings.

    Args:
        trainer: The configuration.
        algorithm: The method.
        datamodule: The data.
        seconds: For all settings together; each makes a few steps in any case.

    Raises:
        ValueError: If the configuration cannot be measured.
    """
    if trainer.fabric.device.type != "cpu":
        raise ValueError("tune measures the settings of a CPU: give --trainer.accelerator cpu")
    if isinstance(algorithm, JointAlgorithm):
        raise ValueError(
            f"tune measures clients that train alone, and those of {type(algorithm).__name__} train with the server; "
            "compare --trainer.devices and --trainer.precision in two short runs"
        )
    exact: Precision = "32-true" if trainer.precision == "bf16-mixed" else trainer.precision
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of this process would not exist in the forked ones, which would wait for them
    try:
        datamodule.prepare_data()
        datamodule.setup("fit")
        load, cores = os.getloadavg()[0], usable_cores()
        settings = settings_to_try(cores, trainer.cohort_size, exact)
        report = TuningReport([], load, cores)

        def measure(settings: Iterable[Setting], seconds: float) -> None:
            for setting in settings:
                try:
                    steps = _measure(setting, seconds, trainer, algorithm, datamodule)
                    report.rows.append(Row(setting, steps))
                except LeftOutError as reason:
                    report.left_out.append((setting, str(reason)))

        measure(settings, seconds / (len(settings) + 2))
        measure(list(stacked(report.rows, trainer.cohort_size)), seconds / (len(settings) + 2))
    finally:
        torch.set_num_threads(threads)
    if not report.rows:
        raise ValueError(_nothing_measured([reason for _, reason in report.left_out]))
    return report


def _nothing_measured(reasons: Sequence[str]) -> str:
    """The message if all settings were left out; where the configuration itself is refused, that refusal."""
    different = list(dict.fromkeys(reasons))
    if len(different) == 1 and different[0] != _NO_ANSWER:
        return different[0]
    return f"tune: no setting made a step: {'; '.join(different)}"


def stacked(rows: Sequence[Row], clients: int) -> Iterator[Setting]:
    """The fastest setting of each kind of precision with all clients of a rank in one stack.

    Args:
        rows: What was measured.
        clients: Clients of a round.
    """
    for _, of_kind in groupby(sorted(rows, key=_is_mixed), key=_is_mixed):
        fastest = min(of_kind, key=lambda row: row.round_seconds).setting
        if (clients_at_once := math.ceil(clients / fastest.ranks)) > 1:
            ranks = math.ceil(clients / clients_at_once)  # fewer where the stacks are fewer than the ranks
            yield replace(fastest, clients_at_once=clients_at_once, ranks=ranks)


def _is_mixed(row: Row) -> bool:
    return row.setting.precision == "bf16-mixed"


def _measure(setting: Setting, seconds: float, *configured: Any) -> Steps:
    """Try a setting in processes of its own; the slowest rank counts.

    Raises:
        LeftOutError: The setting cannot train the configuration, or a process dies or does not answer.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(setting.ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(setting.ranks)]
    ranks = [
        context.Process(target=_measure_here, args=(sender, barrier, setting, seconds, *configured))
        for _, sender in pipes
    ]
    for rank, (_, sender) in zip(ranks, pipes, strict=True):
        rank.start()
        sender.close()  # so that the end of the process ends the wait below
    answers = [_answer(receiver, 3 * seconds + _PATIENCE) for receiver, _ in pipes]
    for rank in ranks:
        rank.kill()
        rank.join()
    if refusals := [answer for answer in answers if isinstance(answer, str)]:
        raise LeftOutError(next((text for text in refusals if text != _NO_ANSWER), _NO_ANSWER))
    found = [answer for answer in answers if isinstance(answer, Steps)]
    return max(found, key=lambda steps: steps.round_seconds(setting.ranks))


def _answer(receiver: Connection, seconds: float) -> Steps | str:
    """What a rank has measured, or why it has not."""
    try:
        answer: Steps | str = receiver.recv() if receiver.poll(seconds) else _NO_ANSWER
    except EOFError:
        return _NO_ANSWER
    return answer


def _measure_here(
    answer: Connection, barrier: Any, setting: Setting, seconds: float, trainer: TunableTrainer, *configured: Any
) -> None:
    """Measure in this process, whose copies of trainer, algorithm and data nobody else uses."""
    torch.set_num_threads(setting.threads)
    keep_freed_memory()
    logging.disable(logging.WARNING)  # else each process repeats what the first one says
    warnings.simplefilter("ignore")
    try:
        run = _run_with(setting, trainer, *configured)
        barrier.wait()
        answer.send(measure_steps(run, seconds, setting.clients_at_once))
    except threading.BrokenBarrierError:
        answer.send(_NO_ANSWER)  # another rank says why
    except Exception as error:
        barrier.abort()  # the other ranks would wait for this one
        answer.send(_reason(error))


def _run_with(setting: Setting, trainer: TunableTrainer, *configured: Any) -> Run:
    """The configured run with a setting, in its first round; it writes no files."""
    trainer.fabric = launch.make_fabric("cpu", 1, 1, "auto", setting.precision, 1)
    trainer.channels_last, trainer.precision = setting.channels_last, setting.precision
    trainer.clients_at_once = setting.clients_at_once
    trainer.dtype = torch.float64 if setting.precision == "64-true" else torch.float32
    trainer.folder = RunFolder(False, writes=False)
    run = setup.make_run(trainer, "fit", *configured)
    run.algorithm.federation = federation = trainer.make_federation(run)
    run.status.round_index = 1
    fit_loop.draw_cohort(run)
    fit_loop.begin_round(run, federation)
    return run


def _reason(error: Exception) -> str:
    """A refusal as it is; of any other error also the line of the user's code."""
    return str(error) if isinstance(error, (ValueError, OSError, LeftOutError)) else compatibility.where(error)


def measure_steps(run: Run, seconds: float, clients_at_once: int = 1) -> Steps:
    """Time steps of a client and of the server.

    Args:
        run: A run in its first round.
        seconds: For both together.
        clients_at_once: Clients in a stack.

    Raises:
        LeftOutError: The clients cannot be stacked, or are too large for it.
    """
    algorithm, server = run.algorithm, run.local_data(sampling.SERVER)
    load_state(algorithm, algorithm.server.model())
    work_of_server = algorithm.on_server_start(server)
    client, work, all_images = _first_client_with_work(run)
    cohort = [run.local_data(client) for client in run.status.cohort]
    if clients_at_once > 1 and clients_at_once * sum(p.nbytes for p in algorithm.parameters()) > LARGEST_STACK:
        raise LeftOutError(f"the weights of {clients_at_once} clients have more than {LARGEST_STACK >> 20} MiB")
    if run.local_training.choose(algorithm, cohort, run.client_optimizer, run.fabric) != clients_at_once:
        raise LeftOutError(run.local_training.refusal or "fewer than two clients of the first round have work")
    budget = seconds / 2 if work.num_steps and work_of_server.num_steps else seconds
    if clients_at_once > 1:
        of_a_client = _seconds_of_a_stacked_step(run, cohort[:clients_at_once], budget)
    else:
        loss_of_client = keyed(algorithm, client, algorithm.training_step)
        of_a_client = _seconds_of_a_step(run, "client", work, loss_of_client, budget)
    loss_of_server = keyed(algorithm, server, algorithm.server_training_step)
    return Steps(
        client=of_a_client,
        server=_seconds_of_a_step(run, "server", work_of_server, loss_of_server, budget),
        client_steps=work.num_steps * len(run.status.cohort),
        server_steps=work_of_server.num_steps,
        all_images=all_images,
    )


def _first_client_with_work(run: Run) -> tuple[LocalData, LocalWork, bool]:
    """A client of the cohort and its work; without a threshold of the confidence if none has work with it."""
    clients = [run.local_data(client) for client in run.status.cohort[:3]]
    for lowered in (False, True):
        if lowered and hasattr(run.algorithm, "threshold"):
            vars(run.algorithm)["threshold"] = 0.0
        for data in clients:
            load_state(run.algorithm, run.algorithm.broadcast(data.party))
            work = run.algorithm.on_client_start(data)
            if work.num_steps:
                return data, work, lowered
    return data, work, False


def _seconds_of_a_step(
    run: Run, party: Literal["client", "server"], work: LocalWork, step_loss: Any, seconds: float
) -> float:
    """Mean time of a step after the first ones, NaN without any."""
    loop = Loop(run.algorithm, run.client_optimizer if party == "client" else run.server_optimizer, run.fabric)
    return _Clock(seconds).measure(lambda clock: loop.train(work, step_loss, f"{party}/loss", clock.client_batch_ended))


def _seconds_of_a_stacked_step(run: Run, clients: Sequence[LocalData], seconds: float) -> float:
    """Mean time of a stacked step for each client, NaN without any."""
    algorithm, optimizer = run.algorithm, run.client_optimizer
    ready = list(vectorized.prepared(algorithm, clients, NoObserver(), None))
    steps = min((client.work.num_steps for client in ready), default=0)
    equal = [replace(client, work=client.work.limited(steps)) for client in ready]
    return _Clock(seconds, len(ready)).measure(
        lambda clock: vectorized.train_in_new_memory(algorithm, equal, [{}] * len(equal), optimizer, run.fabric, clock)
    )


class _EnoughError(Exception):
    """The time for a measurement is over."""


class _Clock(NoObserver):
    """The times at which steps end.

    Args:
        seconds: After these the measurement ends.
        together: Clients that make each step at the same time.
    """

    def __init__(self, seconds: float, together: int = 1) -> None:
        self.seconds = seconds
        self.together = together
        self.started = time.perf_counter()
        self.ends: list[float] = []

    def measure(self, train: Callable[[_Clock], object]) -> float:
        """Mean time of a client's step after the first ones, NaN without any.

        Args:
            train: Makes some steps; called until there are enough.
        """
        first = WARM_UP * self.together
        try:
            while self.together:
                before = len(self.ends)
                train(self)
                if len(self.ends) == before:
                    return math.nan  # there is no step, or every batch was skipped
        except _EnoughError:
            return (self.ends[-1] - self.ends[first - 1]) / (len(self.ends) - first)
        return math.nan

    def client_batch_ended(self, step: int) -> None:
        """Note the time; steps of clients that train together end together."""
        self.ends.append(time.perf_counter())
        steps, rest = divmod(len(self.ends), self.together)
        if self.ends[-1] - self.started > self.seconds and steps > WARM_UP and not rest:
            raise _EnoughError
