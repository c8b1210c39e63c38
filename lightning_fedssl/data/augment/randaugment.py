"""RandAugment on whole batches: pools of operations, and the stage that applies them to uint8
images.

Pools of RandAugment (Cubuk et al., 2020, https://arxiv.org/abs/1909.13719) differ between papers
and must not be mixed:

* :data:`FIXMATCH`: 14 operations of FixMatch (Sohn et al., 2020, https://arxiv.org/abs/2001.07685),
  as used by FedRGD and Semi-SFL; two with replacement, each with probability 1/2 at a magnitude
  1..9 of 10; then a cutout.
* :data:`SEMIFL`: 15 operations at maximal magnitude, as in the public code of SemiFL (Diao et al.,
  2022, https://arxiv.org/abs/2106.01432); no final cutout.
* :data:`DIGITS`: for grey strokes; no operation that could turn a digit into another one. Our
  choice, not from a paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from lightning_fedssl.data.augment import kernels as ops
from lightning_fedssl.data.augment.kernels import Kernel, Size

GREY = 127
"""The value that FixMatch's cutout paints."""


CACHED_VALUES = 2**16
"""Pixel values that a kernel treats at once on a CPU: its float64 temporaries stay in the cache."""


@dataclass(frozen=True)
class Operation:
    """One entry of a pool.

    Attributes:
        name: Its name in the papers.
        kernel: The kernel; ``None`` does not change the image.
        parameters: Parameter row of the kernel as a function of the magnitude, which carries the
            drawn sign, and of the image size. Two uniform numbers per image follow these columns.
    """

    name: str
    kernel: Kernel | None = None
    parameters: Callable[[int, Size], Sequence[float]] = lambda v, size: ()


@dataclass(frozen=True)
class Pool:
    """A pool of RandAugment: the operations, and how they are drawn.

    Attributes:
        operations: Drawn uniformly, with replacement.
        magnitudes: Drawn uniformly for each operation; the sign is a fair coin.
        count: Operations per image, one after the other.
        probability: Of applying a drawn operation.
        cutout: Side of the final cutout's square by image size, in pixels; ``None`` for no cutout.
        cutout_grey: The value it paints.
        levels: Each image draws from its first m magnitudes only, with m uniform in this range
            (inclusive); ``None``: from all.
    """

    operations: tuple[Operation, ...]
    magnitudes: tuple[int, ...]
    count: int = 2
    probability: float = 0.5
    cutout: Callable[[Size], int] | None = None
    cutout_grey: int = GREY
    levels: tuple[int, int] | None = None

    def photometric(self) -> Pool:
        """The operations that move no pixel."""
        moving = (ops.affine_nearest, ops.affine_bilinear, ops.affine_filled)
        return replace(self, operations=tuple(o for o in self.operations if o.kernel not in moving))

    def code(self, name: str, magnitude: int) -> int:
        """The number of an operation at a signed magnitude.

        :meth:`parameter_rows` are in this order.
        """
        operation = [entry.name for entry in self.operations].index(name)
        level = self.magnitudes.index(abs(magnitude))
        return (operation * len(self.magnitudes) + level) * 2 + (magnitude < 0)

    def parameter_rows(self, size: Size) -> list[tuple[Kernel | None, Sequence[float]]]:
        """Kernel and parameters of every operation, magnitude and sign, for images of one size."""
        rows = []
        for operation, magnitude, sign in product(self.operations, self.magnitudes, (1, -1)):
            rows.append((operation.kernel, operation.parameters(sign * magnitude, size)))
        return rows


def _factor(v: int, size: Size) -> Sequence[float]:
    return [abs(v) * 0.9 / 10 + 0.05]


def _brightness(v: int, size: Size) -> Sequence[float]:
    return ops.brightness_table(abs(v) * 0.9 / 10 + 0.05)


def _posterize(v: int, size: Size) -> Sequence[float]:
    return ops.posterize_table(abs(v) * 4 // 10 + 4)


def _shear_x(v: int, size: Size) -> Sequence[float]:
    return 1, v * 0.3 / 10, 0, 0, 1, 0


def _shear_y(v: int, size: Size) -> Sequence[float]:
    return 1, 0, 0, v * 0.3 / 10, 1, 0


FIXMATCH = Pool(
    (
        Operation("AutoContrast", ops.auto_contrast),
        Operation("Brightness", ops.table, _brightness),
        Operation("Color", ops.color, _factor),
        Operation("Contrast", ops.contrast, _factor),
        Operation("Equalize", ops.equalize),
        Operation("Identity"),
        Operation("Posterize", ops.table, _posterize),
        Operation("Rotate", ops.affine_nearest, lambda v, size: ops.rotation(3 * v, size)),
        Operation("Sharpness", ops.sharpness, _factor),
        Operation("ShearX", ops.affine_nearest, _shear_x),
        Operation("ShearY", ops.affine_nearest, _shear_y),
        Operation(
            "Solarize", ops.table, lambda v, size: ops.solarize_table(256 - abs(v) * 256 // 10)
        ),
        Operation(
            "TranslateX",
            ops.affine_nearest,
            lambda v, size: (1, 0, int(v * 0.3 / 10 * size[1]), 0, 1, 0),
        ),
        Operation(
            "TranslateY",
            ops.affine_nearest,
            lambda v, size: (1, 0, 0, 0, 1, int(v * 0.3 / 10 * size[0])),
        ),
    ),
    magnitudes=tuple(range(1, 10)),
    cutout=lambda size: min(size) // 2,
)
"""The pool of FixMatch. The cutout is half the side at every size: 16 pixels at 32 and 14 at 28, as
in FedRGD's code.

At other sizes the codes differ: FedRGD's has 14 pixels wherever the width is not 32, Semi-SFL's has
16 always. Here it is 48 pixels at 96 (STL-10) and 72 at 144 (IMAGE-100), so that the same share of
an image is covered.
"""

SEMIFL = Pool(
    (
        Operation("AutoContrast", ops.auto_contrast),
        Operation("Brightness", ops.table, lambda v, size: ops.brightness_table(1.9)),
        Operation("Color", ops.color, lambda v, size: [1.9]),
        Operation("Contrast", ops.contrast, lambda v, size: [1.9]),
        Operation("Cutout", ops.cutout, lambda v, size: (40, GREY)),
        Operation("Equalize", ops.equalize),
        Operation("Invert", ops.table, lambda v, size: ops.solarize_table(0)),
        Operation("Posterize", ops.table, lambda v, size: ops.posterize_table(4)),
        Operation("Rotate", ops.affine_nearest, lambda v, size: ops.rotation(3 * v, size)),
        Operation("Sharpness", ops.sharpness, lambda v, size: [1.9]),
        Operation("ShearX", ops.affine_bilinear, _shear_x),
        Operation("ShearY", ops.affine_bilinear, _shear_y),
        Operation("Solarize", ops.table, lambda v, size: ops.solarize_table(0)),
        Operation("TranslateX", ops.affine_bilinear, lambda v, size: (1, 0, 10 * v, 0, 1, 0)),
        Operation("TranslateY", ops.affine_bilinear, lambda v, size: (1, 0, 0, 0, 1, 10 * v)),
    ),
    magnitudes=(10,),
)
"""The pool of SemiFL's code: maximal, so a translation of a 32-pixel image leaves black and
Solarize inverts.

The code draws a probability from U(0.2, 0.8) for every operation and then applies it with that
probability; since nothing else depends on it, that is a probability of 1/2.
"""


def _zoom(v: int, size: Size) -> Sequence[float]:
    scale = 1 + 0.02 * v
    return ops.centered((scale, 0, 0, scale), size)


DIGITS = Pool(
    (
        Operation("AutoContrast", ops.auto_contrast),
        Operation("Brightness", ops.table, lambda v, size: ops.brightness_table(1 + 0.05 * v)),
        Operation("Contrast", ops.contrast, lambda v, size: [1 + 0.05 * v]),
        Operation("Identity"),
        Operation("Posterize", ops.table, _posterize),
        Operation("Rotate", ops.affine_bilinear, lambda v, size: ops.rotation(2 * v, size)),
        Operation("Scale", ops.affine_bilinear, _zoom),
        Operation("Sharpness", ops.sharpness, lambda v, size: [1 + 0.1 * v]),
        Operation(
            "ShearX", ops.affine_bilinear, lambda v, size: ops.centered((1, 0.03 * v, 0, 1), size)
        ),
        Operation(
            "ShearY", ops.affine_bilinear, lambda v, size: ops.centered((1, 0, 0.03 * v, 1), size)
        ),
        Operation(
            "TranslateX", ops.affine_bilinear, lambda v, size: (1, 0, v / 72 * size[1], 0, 1, 0)
        ),
        Operation(
            "TranslateY", ops.affine_bilinear, lambda v, size: (1, 0, 0, 0, 1, v / 72 * size[0])
        ),
    ),
    magnitudes=tuple(range(1, 10)),
    cutout=lambda size: min(size) // 4 - 1,
    cutout_grey=0,
)
"""Label-preserving: up to 18 degrees, shear 0.27, zoom 18 %, a shift of an eighth, and a black
square of a quarter."""


def _filled(linear: tuple[float, float, float], side: int, fill: int = 128) -> Sequence[float]:
    """A shear or a shift along the axis ``side`` (0: x), grey outside."""
    x: list[float] = [1, 0, 0, 0, 1, 0, fill]
    x[3 * side : 3 * side + 3] = linear
    return x


FEDMATCH = Pool(
    (
        Operation("ShearX", ops.affine_filled, lambda v, size: _filled((1, v * 0.3 / 9, 0), 0)),
        Operation("ShearY", ops.affine_filled, lambda v, size: _filled((v * 0.3 / 9, 1, 0), 1)),
        Operation(
            "TranslateX",
            ops.affine_filled,
            lambda v, size: _filled((1, 0, v * 0.2 / 9 * size[1]), 0),
        ),
        Operation(
            "TranslateY",
            ops.affine_filled,
            lambda v, size: _filled((0, 1, v * 0.2 / 9 * size[0]), 1),
        ),
        Operation(
            "Rotate", ops.affine_filled, lambda v, size: [*ops.rotation(40 * abs(v), size), 128]
        ),
        Operation("Color", ops.color, lambda v, size: [1 + 0.1 * v]),
        Operation("Sharpness", ops.sharpness, lambda v, size: [1 + 0.1 * v]),
        Operation("Contrast", ops.contrast, lambda v, size: [1 + v * 0.5 / 9]),
        Operation("Brightness", ops.table, lambda v, size: ops.brightness_table(1 + v * 0.3 / 9)),
        Operation(
            "Posterize", ops.table, lambda v, size: ops.posterize_table(round(8 - 4 * abs(v) / 9))
        ),
        Operation(
            "Solarize",
            ops.table,
            lambda v, size: ops.solarize_table(math.ceil(256 - 25 * abs(v) / 9)),
        ),
        Operation("AutoContrast", ops.auto_contrast),
        Operation("Equalize"),
    ),
    magnitudes=(0, 1, 2, 3, 4),
    count=6,
    probability=1.0,
    levels=(2, 5),
)
"""The pool of FedMatch's code, where Equalize does nothing. Shears are bilinear here (there
bicubic), and grey outside.

Six operations in every image, each at a magnitude below a number M that the image draws from 2 to
5.
"""

POOLS = {"fixmatch": FIXMATCH, "semifl": SEMIFL, "digits": DIGITS, "fedmatch": FEDMATCH}
"""The pools that ``data.strong`` can name."""


class RandAugment:
    """A few operations of a pool in sequence, drawn for every image.

    Args:
        pool: What to draw from.
        static: Run every kernel on all images and select, instead of each kernel on the images that
            drew it. The result is bitwise identical. Default: on accelerators, where it needs no
            transfer of row numbers to the host.
    """

    def __init__(self, pool: Pool, static: bool | None = None) -> None:
        self.pool = pool
        self.static = static
        self.draws = 6 * pool.count + (pool.levels is not None)
        # By size and device: the kernels, the kernel of each code, and each kernel's parameters by
        # code.
        self._tables: dict[
            tuple[Size, torch.device], tuple[Sequence[Kernel], Tensor, Sequence[Tensor]]
        ] = {}

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Transform uint8 ``images`` with ``draws``, six per operation: which, magnitude, sign,
        whether, place (2).
        """
        drawn_from: int | Tensor = len(self.pool.magnitudes)
        if self.pool.levels is not None:
            low, high = self.pool.levels
            drawn_from = low + (draws[:, -1] * (high - low + 1)).floor()
        for numbers in draws[:, : 6 * self.pool.count].split(6, dim=1):
            images = self.apply(images, self.codes(numbers, drawn_from), numbers[:, 4:])
        return images

    def codes(self, draws: Tensor, drawn_from: int | Tensor | None = None) -> Tensor:
        """Codes (:meth:`Pool.code`) ``(n,)`` from uniform numbers ``(n, >= 4)``: which, magnitude,
        sign, whether.

        Args:
            draws: The numbers.
            drawn_from: How many of the magnitudes each image draws from, ``(n,)`` or one number;
                all if left out.
        """
        pool = self.pool
        levels = len(self.pool.magnitudes)
        operation = (draws[:, 0] * len(pool.operations)).long()
        level = (draws[:, 1] * (levels if drawn_from is None else drawn_from)).long()
        code = (operation * levels + level) * 2 + (draws[:, 2] < 0.5)
        return torch.where(draws[:, 3] < pool.probability, code, 2 * levels * len(pool.operations))

    def apply(self, images: Tensor, codes: Tensor, places: Tensor) -> Tensor:
        """Apply one operation per image: its ``codes`` ``(n,)``, and ``places`` ``(n, 2)`` in [0,
        1) for a cutout.
        """
        height, width = images.shape[2:]
        kernels, kernel_of, parameters = self._tables_for((height, width), images.device)
        chosen = kernel_of[codes]
        static = images.device.type != "cpu" if self.static is None else self.static
        apply = _apply_to_all if static else _apply_to_rows
        result = images.clone()
        for number, (kernel, table) in enumerate(zip(kernels, parameters, strict=True)):
            result = apply(kernel, table, result, chosen == number, codes, places)
        return result

    def _tables_for(
        self, size: Size, device: torch.device
    ) -> tuple[Sequence[Kernel], Tensor, Sequence[Tensor]]:
        """The pool's tables, made at the first batch of a size."""
        if (size, device) not in self._tables:
            rows = self.pool.parameter_rows(size)
            number_of: dict[Kernel, int] = {}
            codes = [-1] * (len(rows) + 1)  # of the kernel; the last code changes nothing
            for code, (kernel, _) in enumerate(rows):
                if kernel is not None:
                    codes[code] = number_of.setdefault(kernel, len(number_of))
            parameters = [_parameter_table(rows, kernel).to(device) for kernel in number_of]
            self._tables[size, device] = (
                [*number_of],
                torch.tensor(codes, device=device),
                parameters,
            )
        return self._tables[size, device]


def _parameter_table(
    rows: Sequence[tuple[Kernel | None, Sequence[float]]], kernel: Kernel
) -> Tensor:
    """Parameters of one kernel by code: ``(codes + 1, p)`` float64; zero where the code has another
    kernel.
    """
    width = max(len(parameters) for owner, parameters in rows if owner is kernel)
    table = torch.zeros(len(rows) + 1, width, dtype=torch.float64)
    for code, (owner, parameters) in enumerate(rows):
        if owner is kernel:
            table[code] = torch.tensor(parameters, dtype=torch.float64)
    return table


def _apply_to_rows(
    kernel: Kernel, table: Tensor, images: Tensor, mask: Tensor, codes: Tensor, places: Tensor
) -> Tensor:
    """Run a kernel on the images under ``mask`` alone, in place."""
    drawn = mask.nonzero().squeeze(1)
    at_once = max(1, CACHED_VALUES // images.shape[1:].numel())
    for start in range(0, len(drawn), at_once):
        rows = drawn[start : start + at_once]
        parameters = torch.cat([table[codes[rows]], places[rows].double()], dim=1)
        images.index_copy_(0, rows, kernel(images[rows], parameters))
    return images


def _apply_to_all(
    kernel: Kernel, table: Tensor, images: Tensor, mask: Tensor, codes: Tensor, places: Tensor
) -> Tensor:
    """Run a kernel on all images and keep what is under ``mask``:
    fixed shapes, no synchronisation.
    """
    parameters = torch.cat([table[codes], places.double()], dim=1)
    return torch.where(mask[:, None, None, None], kernel(images, parameters), images)
