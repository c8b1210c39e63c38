"""Runs as jobs: with submitit's local executor, and with a real SLURM where one answers; a stand-in for fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.cli import main
from lightning_fedssl.comparison import slurm
from lightning_fedssl.comparison.execute import Outcome
from lightning_fedssl.comparison.plan import Run
from lightning_fedssl.comparison.slurm import Job, submit
from tests.comparison.helpers import FAKE, run_of

submitit = pytest.importorskip("submitit")
ROOT = Path(__file__).resolve().parent.parent.parent


def has_slurm() -> bool:
    """Whether a SLURM has a node that takes jobs."""
    if shutil.which("sbatch") is None:
        return False
    nodes = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
    return "idle" in nodes.stdout or "mix" in nodes.stdout


CLUSTERS = ["local", pytest.param("slurm", marks=pytest.mark.skipif(not has_slurm(), reason="no SLURM answers"))]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.05)


def submitted(runs: list[Run], cluster: str, force: bool = False) -> dict[str, Outcome]:
    """How every run ended, by its name."""
    outcomes: list[Outcome] = []
    parameters = {"timeout_min": 5}
    submit(runs, FAKE, 2, outcomes.append, force, folder=Path("suite"), parameters=parameters, cluster=cluster)
    return {outcome.run.name: outcome for outcome in outcomes}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_jobs_train_each_run_once_and_resume_what_is_left(cluster: str) -> None:
    runs = [run_of("A"), run_of("A", seed=4), run_of("B", fails=True)]
    outcomes = submitted(runs, cluster)
    assert {name: outcome.how for name, outcome in outcomes.items()} == {
        "A, seed 0": "trained", "A, seed 4": "trained", "B, seed 0": "failed"
    }  # fmt: skip
    assert [len(outcomes[name].rows) for name in ("A, seed 0", "A, seed 4", "B, seed 0")] == [3, 3, 0]
    assert (runs[1].folder / "log.txt").read_text() == "seed 4 from round 1\n"
    (runs[0].folder / "lightning_logs/version_0/metrics.csv").write_text("step,val/accuracy\n1,0.1\n2,0.2\n")
    (runs[0].folder / "lightning_logs/version_0/checkpoints/last.ckpt").write_text("2")
    again = submitted([runs[0], runs[1]], cluster)
    assert {name: outcome.how for name, outcome in again.items()} == {"A, seed 0": "resumed", "A, seed 4": "cached"}
    assert [row["step"] for row in again["A, seed 0"].rows] == [1, 2, 3]


def test_an_interruption_cancels_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    canceled: list[Any] = []

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(submitit.helpers, "as_completed", interrupt)
    real = submitit.LocalJob.cancel

    def cancel(job: Any, check: bool = True) -> None:
        canceled.append(job)
        real(job, check)

    monkeypatch.setattr(submitit.LocalJob, "cancel", cancel)
    outcomes: list[Outcome] = []
    with pytest.raises(KeyboardInterrupt):
        submit([run_of("A", sleep=0.2)], FAKE, 1, outcomes.append, folder=Path("suite"), parameters={}, cluster="local")
    assert [outcome.how for outcome in outcomes] == ["stopped"]
    assert len(canceled) == 1


def test_a_job_at_its_time_limit_is_queued_again_without_force() -> None:
    run = run_of("A")
    delayed = Job(FAKE, force=True).checkpoint(run)
    assert delayed.function == Job(FAKE, force=False)
    assert delayed.args == (run,)


def test_the_ranks_of_a_job_or_of_torchrun_are_none_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "SLURM_NTASKS",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ]
    for name in [*names, "MY_RANK"]:
        monkeypatch.setenv(name, "4")
    show = f"import os, sys; print(*{{*{[*names, 'MY_RANK']}}} & {{*os.environ}}, flush=True); sys.exit(1)"
    run = run_of("A")
    assert Job([sys.executable, "-c", show], force=False)(run)[0] == "failed"
    assert (run.folder / "log.txt").read_text() == "MY_RANK\n"


def test_a_wrong_parameter_and_a_missing_slurm_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--launcher local: .*nonsense"):
        submit([run_of("A")], FAKE, 1, print, folder=Path("s"), parameters={"nonsense": 1}, cluster="local")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"--launcher slurm: .*slurm"):
        submit([run_of("A")], FAKE, 1, print, folder=Path("s"), parameters={})


def test_the_command_line_chooses_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(runs: list[Run], command: Any, jobs: int, ended: Any, force: bool, **given: Any) -> None:
        seen.update(given, jobs=jobs, runs=len(runs))

    monkeypatch.setattr("lightning_fedssl.cli.compare.submit", record)
    text = "title: T\nseeds: [0]\ngroups: [{title: G, entries: [{label: A, config: supervised_digits.yaml}]}]\n"
    Path("suite.yaml").write_text(text)
    options = ["--launcher", "slurm", "--slurm", "{timeout_min: 30, slurm_partition: cpu}", "--jobs", "7"]
    assert main(["compare", "suite.yaml", *options, "--output", "out"]) == 0
    parameters = {"timeout_min": 30, "slurm_partition": "cpu"}
    assert seen == {"folder": Path("out"), "parameters": parameters, "jobs": 7, "runs": 1}
