"""What the pages share: how they are written, and their pictures and charts.

A page is one HTML file that needs no other: no network, no script. Everything in it is
escaped by Jinja, since names of classes, files and clients come from anywhere.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from tqdm import tqdm

from lightning_fedssl.storage.files import replace_file
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

RELOADS = 5
"""Seconds after which a browser loads a page again that still changes."""

_MOST_POINTS = 300
_BLUE = (59, 130, 246)


def write(path: Path, template: str, live: bool, **content: Any) -> None:
    """Write a page, completely or not at all.

    Args:
        path: The file.
        template: The file in this folder that the content is filled into.
        live: Whether the page still changes.
        content: What the template names.
    """
    shown = {"folder": path.parent, "version": __version__, "reloads": RELOADS * live, **content}
    text = _environment().get_template(template).render(shown)
    replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "bytes": partial(tqdm.format_sizeof, suffix="B"),
        "mask": picture_of_mask,
        "picture": picture_of,
        "rows": picture_of_rows,
    }
    made.globals |= {
        "duration": tqdm.format_interval,
        "ticks": ticks,
        "colours": [*TABLEAU_COLORS.values()],
    }
    return made


Points = list[tuple[float, float]]
"""Places on the horizontal and the vertical axis, from left to right."""


class Chart(NamedTuple):
    """Curves over the same axes.

    Attributes:
        lines: The points of each curve by its name, from left to right.
        across: Ticks of the horizontal axis.
        upward: Ticks of the vertical axis; the first and the last are its ends.
        ends: The ends of the horizontal axis.
        bands: The outlines of areas, by the names of their curves.
    """

    lines: dict[str, Points]
    across: list[float]
    upward: list[float]
    ends: tuple[float, float]
    bands: Mapping[str, Points]


def chart(
    history: Mapping[int, Mapping[str, float]],
    scalars: Mapping[str, str],
    unit: float = 0,
    levels: Mapping[str, float] = MappingProxyType({}),
) -> Chart | None:
    """A chart of scalars over the rounds; None without a value.

    Args:
        history: The scalars of each round.
        scalars: Their names, and those of the curves.
        unit: If not 0, the sums so far are drawn in this unit.
        levels: Values that hold for the whole run, by the names of their horizontal lines.
    """
    lines: dict[str, Points] = {}
    for scalar, name in scalars.items():
        points, total = [], 0.0
        for number, row in history.items():
            if scalar in row:
                total += row[scalar]
                points.append((float(number), total / unit if unit else row[scalar]))
        lines[name] = points
    for name, value in levels.items():
        lines[name] = [(float(number), value) for number in history]
    return chart_of(lines, {})


def chart_of(lines: Mapping[str, Points], bands: Mapping[str, Points]) -> Chart | None:
    """A chart of curves, without values that are not numbers or too close to be seen; None without
    a point.

    Args:
        lines: The curves by their names.
        bands: See :class:`Chart`.
    """
    drawn: dict[str, Points] = {}
    for name, points in lines.items():
        finite = [point for point in points if math.isfinite(point[1])]
        if finite:
            drawn[name] = finite[:: -math.ceil(len(finite) / _MOST_POINTS)][::-1]
    if not drawn:
        return None
    drawn_points = chain(*drawn.values(), *bands.values())
    xs, ys = zip(*drawn_points, strict=True)
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    across = [
        x for x in MaxNLocator(4, integer=True).tick_values(left, right) if left <= x <= right
    ]
    upward = ticks(0.0 if 0 <= low <= high / 2 else low, high)
    return Chart(drawn, across, upward, (left, right), bands)


def ticks(low: float, high: float) -> list[float]:
    """A few round numbers, the first at most ``low`` and the last at least ``high``."""
    return list(map(float, MaxNLocator(4).tick_values(low, high)))


def picture_of(sample: Tensor, side: int = 96) -> str:
    """The address of a picture of an image, which is its content.

    Args:
        sample: ``(channels, height, width)`` uint8 with 1, 3 or 4 channels.
        side: The longer side of the picture in pixels at most.
    """
    from torchvision.transforms.functional import to_pil_image

    image, file = to_pil_image(sample.cpu()), io.BytesIO()
    image.thumbnail((side, side))
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def picture_of_mask(mask: Tensor) -> str:
    """The address of a picture of classes in the colours of matplotlib's tab10, which repeat.

    Args:
        mask: ``(height, width)``; -1 is transparent.
    """
    pixels = colormaps["tab10"](np.ma.masked_less(mask.numpy(), 0) % 10, bytes=True)
    return picture_of(torch.tensor(pixels).movedim(2, 0))


def picture_of_rows(counts: Tensor, of_all: bool = False) -> str:
    """The address of a picture of a matrix: a pixel for each cell, the more opaque the larger.

    Args:
        counts: ``(rows, columns)``, at least 0.
        of_all: Whether the largest cell is opaque; else a cell that has all of its row.
    """
    whole = counts.max() if of_all else counts.sum(dim=1, keepdim=True)
    opacity = (counts.double() / whole.clamp(min=1e-12)).nan_to_num().sqrt()
    colour = torch.tensor(_BLUE)[:, None, None].expand(3, *counts.shape)
    pixels = torch.cat([colour, 255 * opacity[None].cpu()]).to(torch.uint8)
    return picture_of(pixels, max(counts.shape))
