"""Trains the runs of a suite as an array of jobs on a SLURM cluster, through submitit.

The jobs and the command share the suite's folder. A job that reaches its time limit is queued again
and resumes; an interruption of the command cancels the jobs, which save their last round, and the
same command resumes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_fedssl.comparison.execute import Outcome, terminable, train
from lightning_fedssl.comparison.plan import Resolved, Run
from lightning_fedssl.comparison.results import is_finished, rounds

POLL_SECONDS = 10
"""Seconds between two looks at the jobs."""


@dataclass(frozen=True)
class Job:
    """What a job calls: it trains one run as the command itself would.

    Attributes:
        command: The program that runs ``fit``, with the arguments before ``fit``.
        force: Train from the beginning.
    """

    command: Sequence[str]
    force: bool

    def __call__(self, run: Run) -> tuple[str, float]:
        """Train a run; returns how it ended, and the seconds."""
        outcomes: list[Outcome] = []
        with terminable():
            train([run], self.command, 1, outcomes.append, self.force)
        return outcomes[0].how, outcomes[0].seconds

    def checkpoint(self, run: Run) -> Any:
        """What submitit queues when the time limit is reached: the same run, which then resumes."""
        import submitit

        return submitit.helpers.DelayedSubmission(replace(self, force=False), run)


def submit(
    runs: Sequence[Run],
    command: Sequence[str],
    jobs: int,
    ended: Callable[[Outcome], None],
    force: bool = False,
    *,
    folder: Path,
    parameters: Mapping[str, Any],
    cluster: str = "slurm",
) -> None:
    """Train the runs that have no result yet, as :func:`~lightning_fedssl.comparison.execute.train`
    does.

    Args:
        runs: The runs.
        command: The program that runs ``fit``, with the arguments before ``fit``.
        jobs: The number of jobs at the same time.
        ended: Called with every outcome when its run ends.
        force: Train also the runs that have a result, from the beginning.
        folder: The suite's folder, which all nodes see.
        parameters: Those of submitit, such as ``timeout_min`` and ``slurm_partition``.
        cluster: ``slurm``, or ``local`` for submitit's own processes.

    Raises:
        ValueError: submitit is not installed, a parameter is unknown, or there is no SLURM.
        KeyboardInterrupt: After the jobs were cancelled.
    """
    try:
        import submitit

        executor = submitit.AutoExecutor(folder.resolve() / "jobs", cluster=cluster)
        executor.update_parameters(
            name="lightning-fedssl", slurm_array_parallelism=jobs, **parameters
        )
    except (ImportError, NameError, RuntimeError, TypeError, ValueError) as error:
        needed = "it needs SLURM, known parameters, and pip install '.[slurm]'"
        raise ValueError(f"--launcher {cluster}: {error}; {needed}") from error
    waiting = [run for run in runs if force or not is_finished(rounds(run.folder))]
    for run in (run for run in runs if run not in waiting):
        ended(Outcome(run, rounds(run.folder), "cached"))
    submitted = executor.map_array(Job(command, force), map(_portable, waiting)) if waiting else []
    run_of = dict(zip((job.job_id for job in submitted), waiting, strict=True))
    try:
        for job in submitit.helpers.as_completed(submitted, poll_frequency=POLL_SECONDS):
            run = run_of.pop(job.job_id)
            how, seconds = ("failed", 0.0) if job.exception() else job.result()
            ended(
                Outcome(
                    run,
                    rounds(run.folder) if how not in ("failed", "stopped") else [],
                    how,
                    seconds,
                )
            )
    except BaseException:
        for job in submitted:
            job.cancel(check=False)
        for run in run_of.values():
            ended(Outcome(run, [], "stopped"))
        raise


def _portable(run: Run) -> Run:
    """A run without the objects that only planning needs, in a folder that does not depend on the
    current one.
    """
    nothing: Any = None
    return replace(
        run, resolved=Resolved(run.resolved.text, {}, nothing, nothing), folder=run.folder.resolve()
    )
