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
    """Whether PyTorch emulates bfloat16 on this CPU: an x86 processor on which oneDNN does not compute in it.

    That is one without AVX512; a few have AVX-NE-CONVERT instead. A step of a convolutional network in ``bf16-mixed``
    then takes 11 to 20 times as long as in ``32-true`` (``benchmarks/precisions.py``, AMD EPYC with AVX2).
    """
    return platform.machine().lower() in ("x86_64", "amd64") and not _onednn_computes_bfloat16()


def _onednn_computes_bfloat16() -> bool:
    """What PyTorch asks before it gives a convolution in bfloat16 to oneDNN; without this function, a guess."""
    # The capability describes PyTorch's other kernels, and the variable ATEN_CPU_CAPABILITY changes it.
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(asked()) if asked else "AVX512" in torch.backends.cpu.get_cpu_capability()
