"""The way from ``fit`` to a client's step is short, and a round of SemiFL touches few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning_fedssl
from lightning_fedssl.state import Batch
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
    print(*path, sep="\n")
    assert path[0] == ("/trainer/trainer.py", "fit")
    assert len(path) <= 14
    assert len({file for file, _ in path}) <= 8


def test_a_round_of_semifl_touches_at_most_37_files(tmp_path: Path) -> None:
    algorithm = toy_semifl()
    files: set[str] = set()
    play = algorithm.round

    def watched(federation: Any) -> None:
        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                files.add(frame.f_code.co_filename.removeprefix(PACKAGE))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            play(federation)
        finally:
            sys.setprofile(before)

    vars(algorithm)["round"] = watched
    toy_trainer(tmp_path, max_rounds=2, logger=False).fit(algorithm, ToyData())
    print(*sorted(files), sep="\n")
    assert len(files) <= 37
