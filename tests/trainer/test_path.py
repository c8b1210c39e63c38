"""The way from ``fit`` to a client's step is short, and so is the walk of a whole round of SemiFL."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lightning_fedssl
from lightning_fedssl.state import Batch
from lightning_fedssl.trainer import fit_loop
from tests.test_package import source_files
from tests.toy import ToyData, toy_semifl, toy_trainer

PACKAGE = str(Path(lightning_fedssl.__file__).parent)


def own_frames() -> list[tuple[str, str]]:
    """File and function of the package's frames on the stack, outermost first, from ``fit`` on."""
    frames: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            frames.insert(0, (frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name))
        frame = frame.f_back
    return frames


def test_at_most_fourteen_frames_in_eight_files_lead_to_a_clients_step(tmp_path: Path) -> None:
    algorithm = toy_semifl()
    paths: list[list[tuple[str, str]]] = []
    step = algorithm.training_step

    def noting(batch: Batch, batch_idx: int) -> Any:
        paths.append([*own_frames(), ("/algorithms/semifl.py", "training_step")])
        return step(batch, batch_idx)

    vars(algorithm)["training_step"] = noting
    toy_trainer(tmp_path, max_rounds=1, logger=False).fit(algorithm, ToyData())
    path = paths[0]
    assert path[0] == ("/trainer/trainer.py", "fit")
    assert len(path) <= 14
    assert len({file for file, _ in path}) <= 8


def importers() -> dict[str, set[str]]:
    """By file of the package, the files that import it, directly or through others; not those for type checkers."""
    files = source_files()
    names = {module: "/" + str(path).removeprefix(f"{PACKAGE}/") for module, path in files.items()}
    direct: dict[str, set[str]] = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
        left_out = {inner for node in checked for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node not in left_out:
                for target in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & names.keys():
                    direct.setdefault(names[target], set()).add(names[module])
    found: dict[str, set[str]] = {}
    for name in names.values():
        known, waiting = set[str](), [name]
        while waiting:
            new = direct.get(waiting.pop(), set()) - known
            known |= new
            waiting.extend(new)
        found[name] = known
    return found


def test_the_walk_of_a_round_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over is a call from one file into another; it goes up if the called file imports the caller's."""
    play, handed = fit_loop.run_round, Counter[tuple[str, str]]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called = frame.f_code.co_filename
        passing = ("<lambda>", "<genexpr>", "__torch_function__")  # PyTorch calls the last one at each operator
        if event != "call" or not called.startswith(PACKAGE) or frame.f_code.co_name in passing:
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != called:
            handed[caller.f_code.co_filename.removeprefix(PACKAGE), called.removeprefix(PACKAGE)] += 1

    def watched(run: Any, federation: Any, index: int) -> Any:
        if index < 2:
            return play(run, federation, index)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return play(run, federation, index)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(fit_loop, "run_round", watched)
    toy_trainer(tmp_path, max_rounds=2, logger=False).fit(toy_semifl(), ToyData())
    above = importers()
    up = {pair: n for pair, n in handed.items() if pair[1] in above[pair[0]] and pair[0] not in above[pair[1]]}
    assert handed.total() <= 900
    assert sum(up.values()) <= 65


def test_few_functions_of_the_loop_take_the_whole_run() -> None:
    """Others take the values that they need: scalars, hooks, ranks (Fabric), settings, the algorithm or the data."""
    whole = []
    for module, path in source_files().items():
        if module.startswith(
            ("lightning_fedssl.trainer", "lightning_fedssl.deployment", "lightning_fedssl.local_training")
        ):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    taken = [a.annotation for a in node.args.args + node.args.kwonlyargs if a.annotation is not None]
                    if {"Run", "FederatedTrainer"} & {ast.unparse(annotation) for annotation in taken}:
                        whole.append(f"{module}.{node.name}")
    assert len(whole) <= 29
