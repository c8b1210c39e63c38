"""Eight small classification tasks that no preset was tuned on: four of images, two of signals, two of tables.

Each generator draws from its own random numbers, so a task is a function of its name and the seed. The difficulty is
set once, so that a classifier with all labels is well above one with few; no result of a method entered it.

    python benchmarks/own_tasks.py --draw tasks.png     # a picture of the tasks
    python benchmarks/own_tasks.py --run own_tasks.csv  # the presets as they are, seeds 0 to 2
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from presets import Task, keys, parts, run

Array = NDArray[np.float64]


def _pixels(images: Array) -> NDArray[np.uint8]:
    """8-bit images of half as many pixels a side, so that a run takes half a minute."""
    n, channels, size, _ = images.shape
    small = images.reshape(n, channels, size // 2, 2, size // 2, 2).mean((3, 5))
    return np.asarray(np.clip(small, 0, 1) * 255, dtype=np.uint8)


def _grid(size: int) -> tuple[Array, Array]:
    y, x = np.mgrid[:size, :size] / size
    return y, x


def _tissue(rng: Generator, label: int, client: int) -> Array:
    """Cells on a stained background; classes differ in the cells' density, size and crowding, sites in the stain."""
    size = 32
    y, x = _grid(size)
    count, radius, crowded = [(6, 0.07, 0.0), (14, 0.05, 0.0), (9, 0.06, 0.7)][label]
    centre = rng.uniform(0.2, 0.8, 2)
    nuclei = np.zeros((size, size))
    for _ in range(rng.poisson(count) + 2):
        place = centre + rng.normal(0, 0.12, 2) if rng.random() < crowded else rng.uniform(0, 1, 2)
        r, ratio, angle = radius * rng.uniform(0.7, 1.3), rng.uniform(0.6, 1), rng.uniform(0, np.pi)
        a = (y - place[0]) * np.cos(angle) + (x - place[1]) * np.sin(angle)
        b = (x - place[1]) * np.cos(angle) - (y - place[0]) * np.sin(angle)
        nuclei = np.maximum(nuclei, np.clip(1.5 - (a / r) ** 2 - (b / r / ratio) ** 2, 0, 1))
    background = gaussian_filter(rng.normal(0, 1, (size, size)), 2)
    stains = np.array([[0.93, 0.75, 0.85], [0.85, 0.8, 0.92], [0.97, 0.85, 0.8], [0.88, 0.7, 0.75]])
    dark = np.array([[0.45, 0.25, 0.55], [0.3, 0.3, 0.6], [0.55, 0.3, 0.4], [0.35, 0.15, 0.45]])
    light, deep = stains[client % 4][:, None, None], dark[client % 4][:, None, None]
    stained: Array = light + 0.12 * background + (deep - light) * nuclei * rng.uniform(0.6, 1)
    return stained + rng.normal(0, 0.04, (3, size, size))


def _texture(rng: Generator, label: int, client: int) -> Array:
    """Five grey textures: stripes, checks, blobs, grains and rings, with random frequency, direction and contrast."""
    size = 32
    y, x = _grid(size)
    angle, frequency, phase = rng.uniform(0, np.pi), rng.uniform(3, 6), rng.uniform(0, 2 * np.pi, 2)
    u = np.cos(angle) * x + np.sin(angle) * y
    v = np.cos(angle) * y - np.sin(angle) * x
    stripes = np.sin(2 * np.pi * frequency * u + phase[0])
    patterns: list[Callable[[], Array]] = [
        lambda: stripes,
        lambda: np.sign(stripes * np.sin(2 * np.pi * frequency * v + phase[1])),
        lambda: gaussian_filter(rng.normal(0, 1, (size, size)), 24 / frequency / 3, mode="wrap") * 12,
        lambda: gaussian_filter((rng.random((size, size)) < 0.04).astype(float), 0.7) * 8 - 1,
        lambda: np.sin(2 * np.pi * frequency * np.hypot(x - rng.random(), y - rng.random()) * 1.5 + phase[0]),
    ]
    image = 0.5 + rng.uniform(0.08, 0.25) * np.clip(patterns[label](), -1.5, 1.5) + rng.uniform(-0.15, 0.15)
    return (image + rng.normal(0, 0.12, (size, size)))[None]


def _shape(rng: Generator, label: int, client: int) -> Array:
    """Six coloured shapes of any size and direction, partly hidden by a bar, on a shaded background."""
    size = 32
    y, x = _grid(size)
    centre, r, angle = rng.uniform(0.35, 0.65, 2), rng.uniform(0.18, 0.32), rng.uniform(0, 2 * np.pi)
    dy, dx = y - centre[0], x - centre[1]
    radius, direction = np.hypot(dx, dy), np.arctan2(dy, dx) - angle
    sides = [None, 3, 4, 6]
    if label < 4 and sides[label] is None:
        inside = radius < r
    elif label < 4:
        wedge = 2 * np.pi / sides[label]  # type: ignore[operator]
        inside = radius * np.cos(direction % wedge - wedge / 2) < r * 0.8
    elif label == 4:
        inside = radius < r * (0.65 + 0.35 * np.cos(5 * direction))
    else:
        inside = (radius < r) & (radius > 0.55 * r)
    image = np.ones((3, 1, 1)) * 0.5 + rng.uniform(-0.2, 0.2, (3, 1, 1)) + 0.3 * (x - 0.5) * rng.uniform(-1, 1)
    image = np.where(inside, rng.uniform(0, 1, (3, 1, 1)), image)
    place, width = rng.uniform(0.2, 0.8), rng.uniform(0.06, 0.16)
    bar = np.abs((x if rng.random() < 0.5 else y) - place) < width / 2
    return np.where(bar, rng.uniform(0, 1, (3, 1, 1)), image) + rng.normal(0, 0.06, (3, size, size))


def _spectrogram(rng: Generator, label: int, client: int) -> Array:
    """Log spectrograms of five sounds: tone, rising and falling chirp, warble, pulses; clients differ in background."""
    rate, size = 2048, 32
    t = np.arange(rate) / rate
    f, depth = rng.uniform(200, 500), rng.uniform(0.3, 0.6)
    turns: list[Array] = [
        f * t,
        f * (t + depth * t**2),
        f * ((1 + depth) * t - depth * t**2),
        f * t + 12 * np.sin(2 * np.pi * rng.uniform(3, 6) * t),
        f * t,
    ]
    wave = np.sin(2 * np.pi * turns[label]) + 0.4 * np.sin(4 * np.pi * turns[label])
    if label == 4:
        wave *= np.sin(2 * np.pi * rng.uniform(4, 8) * t + rng.uniform(0, 6)) > 0
    wave *= (t > (start := rng.uniform(0, 0.3))) & (t < start + rng.uniform(0.5, 0.7))
    hum = 0.3 * (client % 3) * np.sin(2 * np.pi * 100 * t)
    noisy = wave + hum + rng.normal(0, rng.uniform(0.5, 1.5), rate)
    frames = noisy[: rate // size * size].reshape(size, -1) * np.hanning(rate // size)
    power = np.log(np.abs(np.fft.rfft(frames, 66, axis=1))[:, 1:33].T + 0.1)
    picture: Array = ((power - power.mean()) / power.std() * 0.2 + 0.5)[None]
    return picture


def _bearing(rng: Generator, label: int, client: int) -> Array:
    """Vibrations of a machine at two places: sound, imbalance, impacts, a drifting tone; speeds differ."""
    t = np.arange(128) / 128
    speed = 6 + client % 5 + rng.normal(0, 0.4)
    turn = 2 * np.pi * speed * t + rng.uniform(0, 2 * np.pi)
    impacts = np.exp(-(((turn * 2 / np.pi) % 4) * 2)) * np.sin(2 * np.pi * 40 * t)
    faults = [0 * t, np.sin(turn) * 1.2, impacts * 2.5, np.sin(turn * 3 + 4 * t**2) * 0.9]
    base = 0.5 * np.sin(2 * turn) + faults[label] * rng.uniform(0.6, 1.2)
    return np.stack([base, 0.6 * np.roll(base, 5)]) + rng.normal(0, 0.8, (2, 128))


def _heartbeat(rng: Generator, label: int, client: int) -> Array:
    """One-channel beats: regular, irregular, missing wave, broad wave, on a wandering baseline."""
    t = np.arange(160) / 160
    rate, signal = rng.uniform(3.5, 6), np.zeros(160)
    place = rng.uniform(0, 1 / rate)
    while place < 1:
        width = (0.022 if label == 3 else 0.010) * rng.uniform(0.8, 1.2)
        signal += np.exp(-(((t - place) / width) ** 2)) * rng.uniform(0.8, 1.2)
        if label != 2:
            signal += 0.25 * np.exp(-(((t - place + 0.05) / 0.015) ** 2))
        signal += 0.3 * np.exp(-(((t - place - 0.08) / 0.03) ** 2))
        place += (1 / rate) * (rng.uniform(0.6, 1.5) if label == 1 else rng.uniform(0.97, 1.03))
    drift = 0.4 * np.sin(2 * np.pi * rng.uniform(0.3, 1) * t + rng.uniform(0, 6))
    noisy: Array = (signal + drift + rng.normal(0, 0.12 + 0.04 * (client % 3), 160))[None]
    return noisy


def _patient(rng: Generator, label: int, client: int) -> Array:
    """Twenty measurements: three hidden factors whose products decide the class; clinics measure with an offset."""
    weights = np.random.default_rng(1).normal(0, 1, (3, 20))
    centres = np.array([[1, 1, 0], [-1, -1, 0], [1, -1, 0.7], [-1, 1, -0.7]]) * 1.1
    factors = centres[label] + rng.normal(0, 0.55, 3)
    offset = np.random.default_rng(100 + client).normal(0, 0.3, 20)
    measured: Array = np.tanh(factors @ weights * 0.5)
    return measured + offset * 0.5 + rng.normal(0, 0.35, 20)


def _sensor(rng: Generator, label: int, client: int) -> Array:
    """Ten readings on curved, interleaved bands of three classes, in a random direction of space."""
    mixing = np.random.default_rng(2).normal(0, 1, (2, 10))
    angle = rng.uniform(0, np.pi) + label * 2 * np.pi / 3
    radius = 1 + 0.5 * (angle - label * 2 * np.pi / 3)
    point = radius * np.array([np.cos(angle), np.sin(angle)]) + rng.normal(0, 0.16, 2)
    return point @ mixing + rng.normal(0, 0.25, 10) + 0.1 * (client % 4)


_TASKS: dict[str, tuple[Callable[[Generator, int, int], Array], str, int, int, int, int]] = {
    # generator, preset, classes, clients, samples, labels
    "tissue": (_tissue, "images", 3, 4, 500, 30),
    "textures": (_texture, "images", 5, 10, 1000, 50),
    "shapes": (_shape, "images", 6, 12, 1500, 120),
    "spectrograms": (_spectrogram, "images", 5, 6, 1000, 50),
    "bearings": (_bearing, "signals", 4, 10, 1000, 40),
    "heartbeats": (_heartbeat, "signals", 4, 8, 1000, 60),
    "patients": (_patient, "table", 4, 5, 800, 24),
    "sensors": (_sensor, "table", 3, 12, 900, 24),
}
NAMES = tuple(_TASKS)


TESTS = 1000
"""Test samples of a task, in addition to those of its clients."""


def make_task(name: str, seed: int) -> Task:
    """One of the tasks; clients have classes in uneven shares (Dirichlet, alpha 1).

    Args:
        name: One of ``NAMES``.
        seed: Of all its random numbers.
    """
    generator, kind, classes, clients, count, num_labels = _TASKS[name]
    rng = np.random.default_rng([seed, NAMES.index(name)])
    shares = rng.dirichlet(np.ones(classes), size=clients)
    owners = rng.integers(clients, size=count + TESTS)
    labels = np.array([rng.choice(classes, p=0.5 * shares[k] + 0.5 / classes) for k in owners])
    samples = np.stack([generator(rng, int(y), int(k)) for y, k in zip(labels, owners, strict=True)])
    stored = _pixels(samples) if kind == "images" else samples.astype(np.float32)
    arrays = parts(stored, labels, count, TESTS, client_ids=owners)
    return Task(kind, arrays, keys(clients, num_labels, "NaturalClients"))


UNSURE = {"model.threshold": 1, "model.adaptive_threshold": False}
RUNS: dict[str, Callable[[Task], dict[str, Any]]] = {
    "method": lambda task: {},
    "without clients": lambda task: {"model.client_steps": 0} if task.preset == "signals" else UNSURE,
    "all labels": lambda task: {"model": "Supervised", "model.server_steps": 100, "data.num_labels": "all"},
}
"""What is run on each task: the preset; the same without client steps, or with those from the few images of
confidence 1 alone; and the network with all labels for four times as many steps."""


def prove(path: Path, names: Sequence[str] = NAMES, seeds: Sequence[int] = range(3)) -> None:
    """Run the presets as they are; append a row to a CSV file after each run.

    Args:
        path: The file: task, run, seed, test accuracies in percent (labels alone, with the clients' samples, the model
            that ``export`` takes) and seconds of a core.
        names: The tasks.
        seeds: The seeds of tasks and runs.
    """
    for what, overrides_of in RUNS.items():
        for seed in seeds:
            for name in names:
                started, task = time.process_time(), make_task(name, seed)
                with TemporaryDirectory() as folder:
                    scalars = run(task, overrides_of(task), seed, Path(folder))
                found = [scalars.get(f"{of}/accuracy", np.nan) for of in ("bound", "test", "export")]
                with path.open("a", newline="") as file:
                    seconds = round(time.process_time() - started)
                    row = [name, what, seed, *(f"{100 * value:.1f}" for value in found), seconds]
                    csv.writer(file, lineterminator="\n").writerow(row)


def draw(path: Path) -> None:
    """Draw ten images of every image task, and signals as lines."""
    from matplotlib import pyplot as plt

    names = [n for n in NAMES if _TASKS[n][1] != "table"]
    figure, axes = plt.subplots(len(names), 12, figsize=(12, len(names)))
    for row, name in zip(axes, names, strict=True):
        arrays, kind = make_task(name, 0).arrays, _TASKS[name][1]
        chosen = np.argsort(arrays["train_labels"][:60], kind="stable")[:: 60 // 12][:12]
        for axis, i in zip(row, chosen, strict=True):
            axis.set_axis_off()
            axis.set_title(f"{name[:5]} {arrays['train_labels'][i]}", fontsize=6)
            if kind == "images":
                axis.imshow(arrays["train"][i].transpose(1, 2, 0).squeeze(), cmap="gray")
            else:
                axis.plot(arrays["train"][i][0], linewidth=0.6)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--tasks", nargs="+", default=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(3))
    options = parser.parse_args()
    if options.draw:
        draw(options.draw)
    if options.run:
        prove(options.run, options.tasks, options.seeds)
