"""What the processor can do."""

from __future__ import annotations

import platform

import torch

SLOW_BFLOAT16 = (
    "this processor has no instructions for bfloat16 (AVX512), so trainer.precision bf16-mixed makes training ten to "
    "twenty times slower: give --trainer.precision 32-true"
)
"""The warning for a run on such a processor."""


def emulates_bfloat16() -> bool:
    """Whether PyTorch emulates bfloat16 on this CPU: an x86 processor without AVX512.

    A step of a convolutional network in ``bf16-mixed`` then takes 11 to 20 times as long as in ``32-true``
    (``benchmarks/precisions.py``, AMD EPYC with AVX2).
    """
    return platform.machine().lower() in ("x86_64", "amd64") and "AVX512" not in torch.backends.cpu.get_cpu_capability()
