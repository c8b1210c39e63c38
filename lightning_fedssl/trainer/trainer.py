"""The federated trainer: Fabric for devices and precision, and the only loop over rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.strategy import Strategy
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerState, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.callbacks import (
    CollapseDetector,
    Dashboard,
    FederatedCheckpoint,
    MetricMatrices,
    PartitionReport,
    PseudoLabelQuality,
    RoundProgress,
    RunResult,
    SystemClock,
)
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.export import describe_model, save_model
from lightning_fedssl.federation import Direction
from lightning_fedssl.functional.averaging import WeightedSum, is_finite
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training import LocalTraining, sequential
from lightning_fedssl.local_training.ops import keyed_dropout, network_options
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics import Counter, MetricCollector
from lightning_fedssl.state import ClientUpdate, ServerState, load_optimizer_state, load_state, set_learning_rate
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.system import SystemModel
from lightning_fedssl.trainer import callback_list, checkpointing, launch, run_folder, setup
from lightning_fedssl.trainer.acceptance import judge
from lightning_fedssl.trainer.callback_list import CallbackList
from lightning_fedssl.trainer.evaluation_metrics import EvaluationMetrics, MetricFactory, MetricName, scalars
from lightning_fedssl.trainer.lightning_view import LIGHTNING_STATES, LightningView, Stage
from lightning_fedssl.trainer.signals import StopRequest

_log = logging.getLogger(__name__)

_BYTES: dict[Direction, str] = {"down": "communication/download_bytes", "up": "communication/upload_bytes"}
_PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.float32, "64-true": torch.float64}


class FederatedTrainer(LightningView):
    """Simulates a federation: draws the clients of each round, lets the algorithm train, evaluates, logs and saves.

    Args:
        max_rounds: T, rounds of the whole run.
        clients_per_round: Clients drawn in a round (C * M in the papers).
        clients_at_once: Clients trained together on one device; 1 trains one after another. ``auto``: 1 on a CPU, on a
            GPU as many as fit into its memory. Where clients train together with the server (Semi-SFL), that many of
            their parts of the network are stacked; ``auto``: all on a GPU, as most of it is in memory at a step anyway.
        accelerator: ``cpu``, ``gpu``, ``auto``, ... as in Lightning.
        devices: Number or list of devices on a node; each trains its share of a round's clients. ``auto``: all GPUs;
            on a CPU as many processes as there are cores to use (with OMP_NUM_THREADS set, cores for that many threads
            each), but no more than ``clients_per_round``.
        num_nodes: Number of machines.
        strategy: ``ddp``, ``ddp_spawn``, ...: how several devices are run; ``auto``: by ddp if there are several.
        precision: ``32-true``; ``bf16-mixed`` for bfloat16 arithmetic on 32-bit weights; ``64-true`` for 64-bit
            everything.
        channels_last: Store convolutions' weights and images with the channels last: faster kernels, the same numbers
            up to rounding.
        compile: Compile the network with ``torch.compile``, which takes a minute or more at the start. Clients that
            train together (``clients_at_once``) do without.
        callbacks: Callbacks beside those that the algorithm needs; one of the same class takes its place.
        system: Speeds of the devices and links to simulate; logs what the run would take as ``system/*``.
        logger: ``null`` or ``true``: TensorBoard and CSV below ``default_root_dir``; ``false``: none; or loggers of
            your own.
        metrics: Metrics in addition to loss and accuracy: ``macro_f1``, ``recall`` (per class), ``auroc``,
            ``calibration_error``, ``confusion_matrix``, or the class of any metric of torchmetrics or of your own.
            ``num_classes`` is filled in from the data. A metric ``M`` is logged as ``val/m`` and ``test/m``.
        check_val_every_n_rounds: Evaluate on the validation images every n rounds, and in the last one.
        fast_dev_run: One round with two clients and a step each, nothing written: does everything run?
        deterministic: Use deterministic kernels only (as PyTorch's ``use_deterministic_algorithms``).
        cuda_graphs: Record the step of clients that train together as a CUDA graph, and replay it. Not measured on a
            GPU yet, so it is asked for; a step that cannot be recorded is made as without, after a warning.
        quarantine: Reject a client's update that moved the weights by more than this many times the round's median
            movement, and by more than the weights' own norm (with at least 3 finite updates in the round): an update
            that has exploded. It is named and counted as ``client/refused``. null accepts every finite update.
        allow_changed: Let a run resume with other settings than its checkpoint's; else they are named and refused.
        client_store: Where clients' states lie between rounds: in ``memory``, or on ``disk``, in files of the run's
            folder that are mapped when a client is drawn; then memory does not grow with the clients.
        enable_progress_bar: A bar on a terminal; one line a round elsewhere. False: neither.
        default_root_dir: Where runs are written; the current folder if left out.
    """

    def __init__(
        self,
        *,
        max_rounds: int = 100,
        clients_per_round: int = 10,
        clients_at_once: int | Literal["auto"] = "auto",
        accelerator: str = "auto",
        devices: int | list[int] | str = 1,
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true",
        channels_last: bool = False,
        compile: bool = False,
        callbacks: Callback | list[Callback] | None = None,
        system: SystemModel | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        metrics: Sequence[MetricName | MetricFactory] = (),
        check_val_every_n_rounds: int = 1,
        fast_dev_run: bool = False,
        deterministic: bool = False,
        cuda_graphs: bool = False,
        quarantine: float | None = 10.0,
        allow_changed: bool = False,
        client_store: Literal["memory", "disk"] = "memory",
        enable_progress_bar: bool = True,
        default_root_dir: str | Path | None = None,
    ) -> None:
        _at_least_one("max_rounds", max_rounds)
        _at_least_one("clients_per_round", clients_per_round)
        _at_least_one("check_val_every_n_rounds", check_val_every_n_rounds)
        _at_least_one("num_nodes", num_nodes)
        if clients_at_once != "auto" and (type(clients_at_once) is not int or clients_at_once < 1):
            raise ValueError(f"trainer.clients_at_once is {clients_at_once}: give a whole number from 1 on, or auto")
        if client_store not in ("memory", "disk"):
            raise ValueError(f"trainer.client_store is {client_store}: give memory or disk")
        self.max_rounds = 1 if fast_dev_run else max_rounds
        self.clients_per_round = clients_per_round
        self.clients_at_once = clients_at_once
        self.metrics = tuple(metrics)
        self.metric_values: dict[str, Tensor] = {}
        self.check_val_every_n_rounds = check_val_every_n_rounds
        self.fast_dev_run = fast_dev_run
        self.deterministic = deterministic
        self.cuda_graphs = cuda_graphs
        if quarantine is not None and not quarantine > 1:
            raise ValueError(
                f"trainer.quarantine is {quarantine}: give a factor above 1, or null to accept every update"
            )
        self.quarantine = quarantine
        self.allow_changed = allow_changed
        self.client_store = client_store
        self.enable_progress_bar = enable_progress_bar
        self.default_root_dir = str(default_root_dir or Path.cwd())
        self.fabric = launch.make_fabric(accelerator, devices, num_nodes, strategy, precision, self.cohort_size)
        self.dtype = _PRECISIONS[precision]
        self.precision = precision
        self.channels_last = channels_last
        self.compile = compile
        self.system = system
        given = callback_list.as_list(callbacks)
        callback_list.refuse_unsupported(given)
        self.callbacks: list[Callback] = given
        self._given_callbacks = tuple(given)
        self._wants_default_loggers = logger in (None, True) and not fast_dev_run
        self.loggers = [] if fast_dev_run or isinstance(logger, bool) else run_folder.as_list(logger)
        self.round_index = 0
        self.total_bytes = 0.0
        self.cohort: list[int] = []
        self.should_stop = False
        self.callback_metrics: dict[str, Tensor] = {}
        self.collector = MetricCollector()
        self.counter = Counter()
        self.algorithm: FederatedAlgorithm
        self.datamodule: FederatedDataModule
        self.local_training: LocalTraining
        self.client_optimizer: Optimizer
        self.server_optimizer: Optimizer
        self.ckpt_path: str | None = None
        self.predictions: Tensor | None = None
        self.state = TrainerState()
        self._launched = False
        self._has_begun = False
        self._reserved: Path | None = None
        self._client_seconds = 0.0
        self._server_phases = 0
        self._rejected: list[tuple[int, str]] = []

    # The four commands.

    def fit(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> None:
        """Train for ``max_rounds`` rounds, then test the last model.

        Args:
            model: The algorithm.
            datamodule: The data and their partition.
            ckpt_path: Go on from a checkpoint: a path, or ``last`` or ``best`` of the newest run below
                ``default_root_dir``.
        """
        self._launch("fit", model, datamodule, ckpt_path)

    def validate(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Evaluate on the validation images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the model as it is if left out.
        """
        return self._launch("validate", model, datamodule, ckpt_path)

    def test(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> dict[str, float]:
        """Evaluate on the test images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to evaluate: a path, ``last`` or ``best``; the model as it is if left out.
        """
        return self._launch("test", model, datamodule, ckpt_path)

    def predict(
        self, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None = None
    ) -> Tensor | None:
        """Class probabilities of the test images, or of the new images in ``data.predict_root``.

        They are written to ``predictions.csv`` in the run folder, with class names, and file names of new images.

        Args:
            model: The algorithm.
            datamodule: The data.
            ckpt_path: The checkpoint to use: a path, ``last`` or ``best``; the model as it is if left out.

        Returns:
            ``(images, classes)``.
        """
        self._launch("predict", model, datamodule, ckpt_path)
        return self.predictions

    # The loop over rounds.

    def _fit(self, ckpt_path: str | Path | None) -> dict[str, float]:
        first, self.round_index, self.total_bytes = 1, 0, 0.0
        if ckpt_path is not None:
            first = checkpointing.resume(self, self._checkpoint(ckpt_path)) + 1
        if first > self.max_rounds:
            _log.warning(
                "the checkpoint has done %d of trainer.max_rounds %d: nothing to train", first - 1, self.max_rounds
            )
        for hook in ("on_fit_start", "on_train_start"):
            self._call(hook)
        with StopRequest() as stop:
            for round_index in range(first, self.max_rounds + 1):
                self.round_index = round_index
                self._run_round()
                if self._any_rank(stop.signal_name is not None):
                    _log.warning("stopped after round %d; go on with --ckpt_path last", self.round_index)
                    self.state.status = TrainerStatus.INTERRUPTED
                    break
                if self._any_rank(self.should_stop):
                    _log.info("a callback asked to stop after round %d", self.round_index)
                    break
        metrics: dict[str, float] = {}
        if self.state.status != TrainerStatus.INTERRUPTED:
            metrics = self._evaluate("test")
            self._log_metrics(metrics)
        for hook in ("on_train_end", "on_fit_end"):
            self._call(hook)
        return metrics

    def _run_round(self) -> None:
        self._has_begun = True
        started = time.perf_counter()
        self._draw_cohort()
        for hook in ("on_train_epoch_start", "on_round_start"):
            self._call(hook)
        lr = self._set_learning_rate()
        self._server_phases = 0
        self.algorithm.on_round_start()
        self.algorithm.round(self)
        self._synchronize_server()
        self._call("on_global_model")
        metrics = self._round_metrics(time.perf_counter() - started) | {"lr": lr}
        due = self.datamodule.has_validation and self.evaluates_now
        if due:
            metrics |= self._evaluate("validate")
        self._log_metrics(metrics)
        if due:
            self._call("on_validation_end")
        self._call("on_train_epoch_end")
        self._call("on_round_end", metrics)

    @property
    def evaluates_now(self) -> bool:
        """Whether the model of this round will be evaluated, on validation or test images."""
        due = self.datamodule.has_validation and self.round_index % self.check_val_every_n_rounds == 0
        return due or self.round_index == self.max_rounds

    def _set_learning_rate(self) -> float:
        """The rate of the round, or of each of its steps; returns the clients' at the first."""
        algorithm, steps = self.algorithm, self.algorithm.steps_per_round or 0
        at = [self.round_index + step / steps for step in range(steps)]
        algorithm.step_factors = [algorithm.schedule.factor(place, self.max_rounds) for place in at]
        for optimizer in (self.client_optimizer, self.server_optimizer):
            set_learning_rate(optimizer, algorithm.schedule.factor(self.round_index, self.max_rounds))
        return self.client_lr

    @property
    def cohort_size(self) -> int:
        """Clients drawn in a round."""
        return min(self.clients_per_round, 2) if self.fast_dev_run else self.clients_per_round

    def _draw_cohort(self) -> None:
        self.cohort = sampling.cohort(self.seed, self.round_index, self.datamodule.num_clients, self.cohort_size)

    def _round_metrics(self, seconds: float) -> dict[str, float]:
        images = self.collector.weight("client/loss")
        if self._client_seconds:
            self.counter.add("time/client_samples_per_s", images / self._client_seconds)
        metrics = self.collector.compute(self.gather)
        counts = self.counter.compute(self.gather)
        self.total_bytes += sum(counts.get(name, 0.0) for name in _BYTES.values())
        metrics |= counts
        if self.total_bytes:
            metrics["communication/total_bytes"] = self.total_bytes
        metrics["time/round_s"] = max(self.gather(seconds))
        self._log_rejected()
        return metrics

    # What an algorithm may ask for.

    @property
    def progress(self) -> float:
        """The fraction of the run that is complete at the end of the current round."""
        return self.round_index / self.max_rounds

    @property
    def num_clients(self) -> int:
        """The number of all clients."""
        return self.datamodule.num_clients

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of all validation images, on every rank."""
        return iter(self.datamodule.evaluation_batches("validate", self.dtype))

    @property
    def client_lr(self) -> float:
        """The learning rate of the clients' steps in this round; where it moves inside the round, now."""
        return float(self.client_optimizer.param_groups[0]["lr"])

    def train_server(self) -> None:
        """Train the global model on the server's work; see :class:`lightning_fedssl.federation.Federation`."""
        algorithm = self.algorithm
        load_state(algorithm, algorithm.server.model())
        self._call("on_server_phase_start")
        # A second phase of a round draws as the next round's first would, not what the first has drawn.
        data = self.datamodule.local_data(sampling.SERVER, self.round_index + self._server_phases, self.dtype)
        self._server_phases += 1
        work = algorithm.on_server_start(data).limited(self.max_steps)
        if work.num_steps:
            if not algorithm.keep_server_optimizer:
                load_optimizer_state(self.server_optimizer, {})
            with sequential.own_random_stream(data):
                sequential.Loop(algorithm, self.server_optimizer, self.fabric).train(
                    work, keyed_dropout.keyed(algorithm, data, algorithm.server_training_step), "server/loss",
                    lambda step: self._call("on_server_batch_end", step),
                )  # fmt: skip
            self._take_live_model()
        self._call("on_server_phase_end")

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort; see :class:`lightning_fedssl.federation.Federation`.

        An update that is not finite or has exploded is left out, counted (``client/refused``) and named in the log.
        """
        self._call("on_client_phase_start")
        yield from self._accepted(
            lambda clients: self.local_training.train_clients(
                self.algorithm, clients, self.client_optimizer, self.fabric, self, self.max_steps
            )
        )

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Train clients and server together; see :class:`lightning_fedssl.federation.Federation`."""
        algorithm = self.algorithm
        if not isinstance(algorithm, JointAlgorithm):
            raise TypeError(f"{type(algorithm).__name__} must be a JointAlgorithm to train clients and server together")
        self._call("on_client_phase_start")
        load_state(algorithm, algorithm.server.model())
        if not algorithm.keep_server_optimizer:
            load_optimizer_state(self.server_optimizer, {})

        def train(clients: Sequence[LocalData]) -> Iterator[ClientUpdate]:
            updates = self.local_training.train_jointly(
                algorithm, clients, self.client_optimizer, self.server_optimizer, self.local_data(sampling.SERVER),
                self.fabric, self, self.cohort, self.max_steps,
            )  # fmt: skip
            self._take_live_model(lambda name: not algorithm.at_clients(name))
            return iter(updates)

        yield from self._accepted(train)

    def _accepted(self, train: Callable[[Sequence[LocalData]], Iterator[ClientUpdate]]) -> Iterator[ClientUpdate]:
        """Train this rank's share of the cohort; afterwards every rank stores the state of all clients."""
        started = time.perf_counter()
        self.algorithm.clients.watch_changes()
        share = sampling.share_out(self.cohort, self._client_sizes, self.world_size)[self.global_rank]
        updates = train([self.local_data(client) for client in share])
        sent = self.algorithm.server.parameters
        for update, reason in judge(updates, sent, self.quarantine, self.gather):
            self.client_judged(update.client, reason)
            if reason is None:
                yield update
        self._client_seconds = time.perf_counter() - started
        self._share_client_state()

    def reduce(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """The sums over all ranks; see :class:`lightning_fedssl.federation.Federation`."""
        if self.fabric.world_size > 1:
            for total in sums.values():
                collectives.reduce(self.fabric, total)
        self._call("on_aggregate")
        return sums

    def local_data(self, party: int) -> LocalData:
        """What a client or the server may train on in this round."""
        return self.datamodule.local_data(party, self.round_index, self.dtype)

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Note what crosses between server and client; see :class:`lightning_fedssl.federation.Federation`."""
        self.counter.add(_BYTES[direction], sum(sizes.values()))
        self._call("on_transfer", client, direction, sizes)

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int]) -> None:
        """An engine tells that a client is ready to train."""
        self.transfer(data.party, "down", sizes)
        self.counter.add("client/trained", float(work.num_steps > 0))
        self.collector.begin(data.party)
        self._call("on_client_start", data, work)
        if not work.num_steps:
            self.collector.commit(data.party)

    def images_labeled(self, indices: Tensor, pseudo: PseudoLabels) -> None:
        """An engine tells that images of a client were given pseudo-labels at a step."""
        self._call("on_pseudo_labels", indices, pseudo)

    def client_batch_ended(self, step: int) -> None:
        """An engine tells that a client made a step."""
        self._call("on_client_batch_end", step)

    def client_ended(self, update: ClientUpdate) -> None:
        """An engine tells that a client has finished."""
        self.transfer(update.client, "up", self.algorithm.upload_sizes(update))
        self._call("on_client_end", update)
        self.collector.end(update.client)

    def client_judged(self, client: int, reason: str | None) -> None:
        """A client's update is accepted (no reason) or rejected; its state and its metrics count only if accepted."""
        if reason is None:
            self.algorithm.clients.commit(client)
            self.collector.commit(client)
            return
        self.algorithm.clients.discard(client)
        self.collector.discard(client)
        self._rejected.append((client, reason))
        self.counter.add("client/refused", 1)

    def _log_rejected(self) -> None:
        """Rank 0 logs the rejected clients of all ranks."""
        for client, reason in sorted(pair for rejected in self.gather(self._rejected) for pair in rejected):
            _log.warning("round %d: client %d %s; it is left out of the average", self.round_index, client, reason)
        self._rejected.clear()

    @property
    def max_steps(self) -> int | None:
        """Steps per party and phase at most; None for no limit."""
        return 1 if self.fast_dev_run else None

    # Ranks.

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        return collectives.gather(self.fabric, value)

    def _any_rank(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def _share_client_state(self) -> None:
        """Store what the clients of other ranks have changed, so that any rank may train any client next time.

        Raises:
            ValueError: If clients of two ranks wrote the same state: one rank would keep the last of them, by chance.
        """
        if self.fabric.world_size == 1:
            return
        clients = self.algorithm.clients
        seen: set[tuple[str, int]] = set()
        for rank, changes in enumerate(self.gather(clients.changes())):
            if twice := sorted(seen & changes.keys()):
                raise ValueError(
                    f"{type(self.algorithm).__name__}: two clients of a round wrote the client state {twice[0][0]!r} "
                    f"of number {twice[0][1]}: give every client a number of its own in self.clients.put"
                )
            seen |= changes.keys()
            if rank != self.global_rank:
                clients.apply(changes)

    def _synchronize_server(self) -> None:
        """Refuse a diverged server; keep the ranks' copies equal where kernels are not deterministic."""
        parameters = self.algorithm.server.parameters
        if not is_finite(parameters.values()):
            raise ValueError(
                f"round {self.round_index}: the global model has weights that are not finite: training diverged; "
                "lower the learning rate (model.optimizer.init_args.lr) or set model.gradient_clip_norm. Checkpoints "
                "of earlier rounds are as they were"
            )
        if self.fabric.world_size > 1 and self.fabric.device.type == "cuda":
            for state in (parameters, self.algorithm.server.buffers, *self.algorithm.server.extra.values()):
                for tensor in (t for t in state.values() if t.dim()):
                    torch.distributed.broadcast(tensor, src=0)

    # Evaluation and logging.

    def _evaluate(self, stage: Stage) -> dict[str, float]:
        """Evaluate the global model; each rank takes its share of the batches."""
        self._has_begun = True
        algorithm, prefix = self.algorithm, "val" if stage == "validate" else "test"
        scores = EvaluationMetrics(self.metrics, self.datamodule.num_classes, self.world_size)
        self._call("on_evaluation_start")
        load_state(algorithm, algorithm.evaluated_model())
        algorithm.eval()
        step = algorithm.validation_step if stage == "validate" else algorithm.test_step
        kept, self.collector = self.collector, MetricCollector()
        algorithm.collector = self.collector.update
        with torch.no_grad(), self.fabric.autocast():
            for index, batch in enumerate(self._evaluation_batches(stage)):
                logits = step(batch, index)
                if logits is not None:
                    scores.update(logits, batch[1])
        values = {f"{prefix}/{name}": value for name, value in scores.compute(self.gather).items()}
        self.metric_values.update(values)
        metrics = scalars(values) | self.collector.compute(self.gather)
        self.collector = kept
        algorithm.collector = kept.update
        self._call("on_evaluation_end", metrics)
        return metrics

    def _evaluation_batches(self, stage: Stage) -> Iterator[tuple[Tensor, Tensor]]:
        which: Literal["validate", "test"] = "validate" if stage == "validate" else "test"
        ranks = (self.fabric.global_rank, self.fabric.world_size)
        batches = iter(self.datamodule.evaluation_batches(which, self.dtype, shard=ranks))
        return islice(batches, 1) if self.fast_dev_run else batches

    def log(self, name: str, value: Any, weight: float | Tensor = 1.0) -> None:
        """Add to the round's weighted mean of a scalar."""
        self.collector.update(name, value, weight)

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        self.callback_metrics.update(_as_tensors(metrics))
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.round_index)
            logger.save()

    # Setting up.

    def _launch(
        self, stage: Stage, model: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        """Run a command on all ranks, which are this process, processes begun like it, or spawned ones."""
        run_on_ranks: Callable[..., dict[str, float]] = self.fabric.launch
        if launch.spawns(self.fabric):
            with TemporaryDirectory() as folder:
                metrics = run_on_ranks(_run_spawned, self, Path(folder), stage, model, datamodule, ckpt_path)
                self._adopt(model, launch.load_outcome(Path(folder)))
            return metrics
        if self._launched:
            return _run(self.fabric, self, stage, model, datamodule, ckpt_path)
        self._launched = True
        metrics = run_on_ranks(_run, self, stage, model, datamodule, ckpt_path)
        collectives.leave_at_exit()
        return metrics

    def _adopt(self, model: FederatedAlgorithm, result: launch.Outcome) -> None:
        """Take over what spawned processes came to."""
        model.configure_model()
        if hasattr(model, "server"):
            del model.server
        model.to(self.dtype)
        load_state(model, result["model"])
        model.server = ServerState.of(model)
        self.round_index = result["round"]
        self.predictions = result["predictions"]
        self.callback_metrics = _as_tensors(result["callback_metrics"])

    def _run_stage(
        self, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        self.seed = sampling.global_seed()
        self.state = TrainerState(TrainerStatus.RUNNING, *LIGHTNING_STATES[stage])
        launch.set_deterministic(self.deterministic)
        with launch.threads_for(self.fabric.device):
            return self._run_command(stage, algorithm, datamodule, ckpt_path)

    def _run_command(
        self, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        try:
            return self._attach_and_run(stage, algorithm, datamodule, ckpt_path)
        finally:
            if self._reserved is not None and not self._has_begun and self.is_global_zero:
                run_folder.release(self._reserved)

    def _attach_and_run(
        self, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule, ckpt_path: str | Path | None
    ) -> dict[str, float]:
        self._attach(stage, algorithm, datamodule)
        try:
            metrics = self._fit(ckpt_path) if stage == "fit" else self._evaluate_command(stage, ckpt_path)
        except BaseException as error:
            self._call("on_exception", error)
            raise
        finally:
            for logger in self.loggers:
                logger.finalize("success" if self.state.status != TrainerStatus.RUNNING else "finished")
            algorithm.collector = None
            self._call("teardown", stage)
        if self.state.status == TrainerStatus.RUNNING:
            self.state.status = TrainerStatus.FINISHED
        return metrics

    def _attach(self, stage: Stage, algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> None:
        self.algorithm, self.datamodule = algorithm, datamodule

        def read() -> None:
            datamodule.prepare_data()
            datamodule.setup(stage)

        collectives.together(self.fabric, read)
        datamodule.to(self.fabric.device)
        self._client_sizes = datamodule.statistics.sizes.tolist()
        if stage == "fit":
            self._check_cohort()
            algorithm.check_data(datamodule)
        self._fit_to_data("num_classes")
        self._fit_to_data("in_shape")
        algorithm.configure_model()
        algorithm.trainer = self  # type: ignore[assignment]
        algorithm.federation = self
        self.fabric.strategy.precision.convert_module(algorithm)
        algorithm.to(self.fabric.device)
        if self.channels_last:
            network_options.lay_out_channels_last(algorithm)
        if self.compile:
            network_options.compile_network(algorithm, self.fabric)
        if not hasattr(algorithm, "server"):
            algorithm.server = ServerState.of(algorithm)
        algorithm.server.to(self.fabric.device)  # an earlier command may have run elsewhere
        algorithm.collector = self.collector.update
        parameters = [p for p in algorithm.parameters() if p.requires_grad]
        self.client_optimizer = setup.build_optimizer(algorithm.optimizer_factory, parameters, "model.optimizer")
        server_optimizer = algorithm.server_optimizer_factory
        self.server_optimizer = setup.build_optimizer(server_optimizer, parameters, "model.server_optimizer")
        self._open_loggers()
        if self.client_store == "disk":
            algorithm.clients.keep_on_disk(self.log_dir)
        self.callbacks = self._all_callbacks(algorithm)
        self._hooks = CallbackList(self.callbacks, self, algorithm)
        watchers = [type(callback).__name__ for callback in self._hooks.listeners("on_client_batch_end")]
        self.local_training = LocalTraining(self.clients_at_once, watchers, self.cuda_graphs)
        self._call("setup", stage)
        for logger in self.loggers:
            logger.log_hyperparams(dict(algorithm.hparams))

    def _fit_to_data(self, name: str) -> None:
        """The data set what the algorithm leaves open, and contradict what is wrong."""
        given, actual = getattr(self.algorithm, name), getattr(self.datamodule, name)
        if given is not None and given not in (actual, list(actual) if isinstance(actual, tuple) else actual):
            raise ValueError(f"model.{name} is {given}, but the data have {actual}: leave it out, the data set it")
        setattr(self.algorithm, name, actual)

    def _open_loggers(self) -> None:
        if self._wants_default_loggers and not self.loggers:
            version = run_folder.reserve_version(self.default_root_dir) if self.is_global_zero else 0
            self._reserved = Path(self.default_root_dir) / f"lightning_logs/version_{version}"
            self.loggers = run_folder.default_loggers(self.default_root_dir, self.fabric.broadcast(version))
        for logger in reversed(self.loggers):
            getattr(logger, "experiment", None)  # opens its files, CSV first: that logger wants an empty folder
        self.share_log_dir()

    def _check_cohort(self) -> None:
        if self.clients_per_round > self.datamodule.num_clients:
            raise ValueError(
                f"trainer.clients_per_round is {self.clients_per_round}, but data.num_clients is only "
                f"{self.datamodule.num_clients}: lower the first or raise the second"
            )

    def _all_callbacks(self, algorithm: FederatedAlgorithm) -> list[Callback]:
        """The user's callbacks, those that the algorithm needs, and the defaults."""
        needed = algorithm.configure_callbacks()
        defaults: list[Callback] = [PartitionReport(), PseudoLabelQuality(), CollapseDetector(), RoundProgress()]
        defaults += [MetricMatrices(), Dashboard(), RunResult()]
        if self.system is not None:
            defaults.append(SystemClock(self.system))
        if not self.fast_dev_run:
            defaults.append(FederatedCheckpoint())
        return callback_list.choose(self._given_callbacks, callback_list.as_list(needed), defaults)

    def _call(self, hook: str, *args: Any) -> None:
        self._hooks.call(hook, *args)

    # Commands other than fit.

    def _evaluate_command(self, stage: Stage, ckpt_path: str | Path | None) -> dict[str, float]:
        if ckpt_path is not None:
            loaded = checkpointing.load_model(self, self._checkpoint(ckpt_path))
            if stage == "validate":
                checkpointing.check_same_data(self, loaded, self._checkpoint(ckpt_path))
        else:
            _log.warning("no ckpt_path given: using the model as it is")
        if stage == "predict":
            self._predict()
            return {}
        if stage == "validate" and not self.datamodule.has_validation:
            raise ValueError("data.validation is 0: there are no validation images; give a fraction above 0, or test")
        metrics = self._evaluate(stage)
        self._log_metrics(metrics)
        return metrics

    def _predict(self) -> None:
        """Every rank predicts all: the rows stay in the data's order."""
        self._has_begun = True
        self._call("on_evaluation_start")
        load_state(self.algorithm, self.algorithm.evaluated_model())
        self.algorithm.eval()
        with torch.no_grad(), self.fabric.autocast():
            batches = enumerate(self.datamodule.predict_batches(self.dtype))
            rows = [self.algorithm.predict_step(batch, index).cpu() for index, batch in batches]
        self.predictions = torch.cat(rows)
        if self.is_global_zero and not self.fast_dev_run:
            path = Path(self.log_dir or self.default_root_dir) / "predictions.csv"
            classes, files = self.datamodule.spec.class_names, self.datamodule.predict_files()
            run_folder.write_predictions(self.predictions, path, classes, files)
            _log.info("class probabilities of %d images: %s", len(self.predictions), path)

    # Checkpoints.

    def save_checkpoint(self, path: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint, completely or not at all; every rank must call it, rank 0 writes.

        Args:
            path: The file.
            weights_only: Leave out the clients' states, such as their optimizers' momentum. A run whose clients have
                states cannot be resumed from such a checkpoint.
            storage_options: Accepted for Lightning's callbacks and not used.
        """
        if self.is_global_zero and not self.fast_dev_run:
            checkpointing.save(self, Path(path), bool(weights_only))
        self.fabric.barrier()

    def save_model(self, folder: str | Path) -> None:
        """Write the global model as ``model.safetensors`` and ``model.json``; every rank must call it, rank 0 writes.

        Args:
            folder: The folder; it is made.
        """
        if self.is_global_zero and not self.fast_dev_run:
            metrics = {name: float(value) for name, value in self.callback_metrics.items()}
            load_state(self.algorithm, self.algorithm.evaluated_model())
            description = describe_model(self.algorithm, self.datamodule, self.round_index, metrics)
            save_model(self.algorithm.configured_network(), description, Path(folder))
        self.fabric.barrier()

    def _checkpoint(self, ckpt_path: str | Path) -> Path:
        return checkpoint_file.find(ckpt_path, Path(self.default_root_dir))

    def _take_live_model(self, which: Callable[[str], bool] = lambda name: True) -> None:
        """The live network, or some of its weights and buffers, becomes the global model."""
        algorithm = self.algorithm
        algorithm.server.update(
            {name: p.detach() for name, p in algorithm.named_parameters() if which(name)},
            {name: b.detach() for name, b in algorithm.named_buffers() if which(name)},
        )


def _run(
    fabric: Fabric,
    trainer: FederatedTrainer,
    stage: Stage,
    model: FederatedAlgorithm,
    datamodule: FederatedDataModule,
    ckpt_path: str | Path | None,
) -> dict[str, float]:
    """A command in one process; at module level, so that it can be sent to others."""
    trainer.fabric = fabric
    return trainer._run_stage(stage, model, datamodule, ckpt_path)


def _run_spawned(
    fabric: Fabric, trainer: FederatedTrainer, folder: Path, stage: Stage, model: FederatedAlgorithm, *more: Any
) -> dict[str, float]:
    """A command in a spawned process, which leaves what it came to in a folder of its parent's."""
    metrics = _run(fabric, trainer, stage, model, *more)
    if fabric.is_global_zero:
        launch.save_outcome(
            {
                "model": model.server.model(),
                "round": trainer.round_index,
                "predictions": trainer.predictions,
                "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            },
            folder,
        )
    collectives.leave(fabric)
    return metrics


def _as_tensors(metrics: dict[str, float]) -> dict[str, Tensor]:
    """Scalars as Lightning's callbacks want them."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"trainer.{key} is {value}: give 1 or more")
