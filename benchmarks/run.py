"""Compares the speed of this package, the fastest simulators that can be installed, and loops in plain PyTorch.

Every contender is a separate process that waits for its turn. Turns alternate (A B C, A B C, ...), so that a change of
the machine's load affects all contenders, and ratios are computed turn by turn. Before the measurements, the script
runs the tests that our loop and the plain loop are bitwise identical; if they fail, nothing is measured. Each of the
three parts has its own file in ``results``:

* ``lr`` and ``cnn``: FedAvg on one workload (``peers/workload.py``) with an overhead-bound and a compute-bound network,
  next to a textbook loop and a tight loop in PyTorch, the peers and centralised training;
* ``semifl``: a SemiFL round, ours and in a sequential re-implementation (``peers/semifl.py``), first checked for
  equality; with ``--semifl-code`` also next to the authors' own code (``peers/semifl_authors.py``: where to get it).

The simulators need a separate environment (``peers/requirements.txt`` says how to create it); the report names a
simulator that is not installed.

    python benchmarks/run.py --peers-python .venv-peers/bin/python
    python benchmarks/run.py --quick --parts lr cnn --suffix=-avx2
    python benchmarks/run.py --parts semifl --semifl-code semifl-code --peers-python .venv-peers/bin/python
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import command_line
from command_line import RESULTS, ROOT
from workers import PEERS, Contender, Result, interleave, is_installed, ratios, report_failures, spread

EQUALITY_TESTS = ("tests/local_training/test_sequential.py",)
NETWORKS = {
    "lr": "softmax regression, 30,730 parameters: dominated by overhead",
    "cnn": "CNN of pfl-research's CIFAR-10 benchmark, 1,626,442 parameters: dominated by arithmetic",
}
STEPS = 250
"""Client steps of a round of the workload: 50 clients, 50 images, batches of 10."""
SAMPLES = 2500

Section = Callable[[argparse.Namespace], list[str]]


def peers(arguments: argparse.Namespace, network: str) -> list[str]:
    """The parts ``lr`` and ``cnn``: FedAvg, the other simulators and centralised training."""
    rounds, turns = (10, 7) if network == "lr" else (1, 5)
    results = interleave(_contenders(network, arguments.peers_python), rounds, _turns(arguments, turns))
    return [
        "## FedAvg and other simulators",
        "",
        "1000 clients with 50 images of 3 x 32 x 32, 50 a round, one epoch of batches of 10, SGD, no evaluation; one",
        "torch thread a process. CPU seconds of the process tree for a round; ratios are the median over turns",
        "(smallest-largest). The *plain* loop is the textbook's, with default SGD and `loss.backward()`; the *tight*",
        "loop makes the same steps with the fastest public calls of PyTorch (fused SGD, `torch.autograd.grad`, one",
        "`foreach` call for all weights). Both take slices of normalised images: they draw no order, make no views,",
        "check no update and count nothing. One row adds these duties to the tight loop: an order drawn from each",
        "client's own random stream, images gathered and normalised from stored pixels, and the norm of each update's",
        "movement. The loss of the global model after the same rounds shows that all did the same work. *Efficiency*",
        "is the samples per CPU second over those of centralised training.",
        "",
        *_peers_table(f"{network}: {NETWORKS[network]}", results),
    ]


def _contenders(network: str, python: str) -> list[Contender]:
    chosen = ("--network", network)
    ours = [
        Contender("lightning_fedssl", "ours.py", chosen),
        Contender("lightning_fedssl, 2 ranks", "ours.py", (*chosen, "--devices", "2")),
    ]
    if network == "lr":
        at_once = (*chosen, "--clients_at_once")
        ours += [
            Contender("lightning_fedssl, one client after another", "ours.py", (*at_once, "1")),
            Contender("lightning_fedssl, 25 clients at once, 2 ranks", "ours.py", (*at_once, "25", "--devices", "2")),
        ]
    if network == "cnn":
        ours += _layouts_and_precisions("lightning_fedssl", chosen)
    return [
        Contender("tight PyTorch loop", "tight.py", chosen),
        Contender("tight PyTorch loop with orders, views and checks", "tight.py", (*chosen, "--duties")),
        Contender("plain PyTorch loop", "bare.py", chosen),
        # Centralised training with the clients' learning rate may not learn within a few rounds.
        Contender("centralised training", "bare.py", (*chosen, "--central"), must_learn=False),
        *ours,
        Contender("pfl 0.6.0", "pfl_peer.py", chosen, python, "pfl"),
        Contender("FedLab 1.3.0", "fedlab_peer.py", chosen, python, "fedlab"),
        Contender("FedJAX 0.0.17", "fedjax_peer.py", chosen, python, "fedjax"),
        Contender("Flower 1.41.0", "flower_peer.py", chosen, python, "flwr", scale=10),
    ]


def _layouts_and_precisions(name: str, chosen: tuple[str, ...]) -> list[Contender]:
    """Channels-last, and in addition bfloat16 where the processor has instructions for it."""
    last = Contender(f"{name}, channels-last", "ours.py", (*chosen, "--channels_last"))
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return [last]
    fast = (*chosen, "--channels_last", "--precision", "bf16-mixed")
    return [last, Contender(f"{name}, channels-last, bf16", "ours.py", fast)]


def _peers_table(title: str, results: dict[str, Result]) -> list[str]:
    tight, plain = results["tight PyTorch loop"].cpu, results["plain PyTorch loop"].cpu
    central = results["centralised training"].cpu
    rows = []
    for name, result in results.items():
        if result.failure:
            continue
        cpu, wall = statistics.median(result.cpu), statistics.median(result.wall)
        to_tight, to_plain = spread(ratios(result.cpu, tight)), spread(ratios(result.cpu, plain))
        efficiency = statistics.median(ratios(central, result.cpu))
        overhead = 1e6 * (cpu - statistics.median(tight)) / STEPS
        loss = f"{result.loss:.3f} ({result.rounds})"
        rows.append(
            f"| {name} | {cpu:.4f} | {wall:.4f} | {to_tight} | {to_plain} | {overhead:+.0f} | {SAMPLES / cpu:,.0f} | "
            f"{efficiency:.2f} | {loss} |"
        )
    head = [
        f"### {title}",
        "",
        "| | CPU s / round | wall s / round | CPU x tight loop | CPU x plain loop | us / step over the tight loop | "
        "samples / CPU s | efficiency | loss (rounds) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return [*head, *rows, *report_failures(results), ""]


def semifl(arguments: argparse.Namespace) -> list[str]:
    """The part ``semifl``."""
    difference = float(_print_of(sys.executable, "semifl.py", "--check"))
    if not difference < 1e-9:
        raise SystemExit(f"the two SemiFL rounds differ by {difference:.1e} in float64")
    plain = Contender("client by client in plain PyTorch", "semifl.py", ("--variant", "plain"))
    results = interleave([Contender("lightning_fedssl", "semifl.py"), plain], 1, _turns(arguments, 5), ask_loss=False)
    return [
        "## A SemiFL round",
        "",
        "10 of 20 clients with 50 images of 3 x 32 x 32, 100 labels at the server, 3 epochs of batches of 10 each,",
        "CNN of width 32 with static batch norm, every image kept; one thread. After two rounds in float64 ours and",
        f"the plain implementation differ by {difference:.0e} in a weight.",
        "",
        "| | CPU s / round | wall s / round | CPU x ours |",
        "|---|---|---|---|",
        *_semifl_rows(results),
        *report_failures(results),
        "",
        *(_semifl_authors(arguments) if arguments.semifl_code else []),
    ]


def _semifl_authors(arguments: argparse.Namespace) -> list[str]:
    """Ours next to the authors' own code."""
    script, code = "semifl_authors.py", ("--code", str(arguments.semifl_code.resolve()))
    authors = Contender("the authors' code", script, code, arguments.peers_python, "anytree", must_learn=False)
    ours = Contender("lightning_fedssl", "semifl.py", ("--variant", "authors-setting"), must_learn=False)
    steps = _print_of(arguments.peers_python, script, *code, "--steps") if is_installed(authors) else "the same"
    results = interleave([ours, authors], 1, _turns(arguments, 5))
    losses = [f"{r.loss:.2f} ({name}, {r.rounds} rounds)" for name, r in results.items() if not r.failure]
    return [
        "## A SemiFL round of the authors' own code",
        "",
        "Their main program at 4ec3663 (`benchmarks/peers/semifl_authors.py` says what is set from outside) and this",
        f"package on the same images, with the sizes as above: WideResNet-10-1, {steps} training steps of 10 images a",
        "round in both (counted), 32-bit numbers, one thread. Both measure the batch-norm statistics on all images,",
        "evaluate 250 test images, write TensorBoard files and save a checkpoint in every round. Initial weights,",
        "partition, drawn clients and views are each code's own; that both compute the same round is tested elsewhere",
        "(`benchmarks/replays.md`). Their code makes views image by image with PIL, also strong views that are not",
        "used, measures the same statistics twice and does a third forward pass of each client's batch.",
        "",
        f"Loss of the global model on the test images: {', '.join(losses) or 'not measured'}.",
        "",
        "| | CPU s / round | wall s / round | CPU x ours |",
        "|---|---|---|---|",
        *_semifl_rows(results),
        *report_failures(results),
        "",
    ]


def _semifl_rows(results: dict[str, Result]) -> list[str]:
    ours = results["lightning_fedssl"].cpu
    return [
        f"| {name} | {statistics.median(r.cpu):.2f} | {statistics.median(r.wall):.2f} | {spread(ratios(r.cpu, ours))} |"
        for name, r in results.items()
        if not r.failure
    ]


def _print_of(python: str, script: str, *arguments: str) -> str:
    """The last word that a worker prints when it runs alone."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [python, str(PEERS / script), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{ended.stderr}{ended.stdout}")
    return ended.stdout.split()[-1]


def _turns(arguments: argparse.Namespace, usual: int) -> int:
    return arguments.turns or (max(3, usual // 2) if arguments.quick else usual)


PARTS: dict[str, Section] = {
    "lr": functools.partial(peers, network="lr"),
    "cnn": functools.partial(peers, network="cnn"),
    "semifl": semifl,
}


def main() -> None:
    """Measure, and write ``results/speed_PART.md`` for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--peers-python", default=".venv-peers/bin/python", help="interpreter of the peers' environment"
    )
    parser.add_argument("--semifl-code", type=Path, help="checkout of the code of SemiFL's authors")
    parser.add_argument("--turns", type=int, help="turns of every contender; 3 to 7 if left out")
    parser.add_argument("--quick", action="store_true", help="fewer turns; about ten minutes on two idle cores")
    parser.add_argument("--suffix", default="", help="ends the names of the result files: another processor's are kept")
    arguments = parser.parse_args()
    if arguments.semifl_code and not (arguments.semifl_code / "src").is_dir():
        parser.error(
            f"--semifl-code {arguments.semifl_code}: there is no folder src; see benchmarks/peers/semifl_authors.py"
        )
    _hold_equal()
    _commit()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        head = _head(arguments, part)
        command_line.write(RESULTS / f"speed_{part}{arguments.suffix}.md", [*head, *PARTS[part](arguments)])


def _hold_equal() -> None:
    """Run the equivalence tests of this commit; without them no ratio is measured."""
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *EQUALITY_TESTS]
    if subprocess.run(tests, cwd=ROOT, check=False).returncode:
        raise SystemExit("the fast paths do not agree with the plain loop: nothing is measured")


def _head(arguments: argparse.Namespace, part: str) -> list[str]:
    given = ["--quick"] if arguments.quick else []
    given += ["--turns", str(arguments.turns)] if arguments.turns else []
    given += [f"--suffix={arguments.suffix}"] if arguments.suffix else []
    given += ["--semifl-code FOLDER"] if arguments.semifl_code and part == "semifl" else []
    command = " ".join(["python benchmarks/run.py", *given, "--parts", part])
    return [
        f"# Speed: {part}",
        "",
        f"`{command}` on {command_line.machine()}; commit {_commit()}; load average at the start "
        f"{os.getloadavg()[0]:.1f}. {' and '.join(f'`{test}`' for test in EQUALITY_TESTS)} passed on this commit.",
        "",
    ]


@functools.cache
def _commit() -> str:
    """The commit, read before result files are written, which would make the checkout look modified."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"


if __name__ == "__main__":
    main()
