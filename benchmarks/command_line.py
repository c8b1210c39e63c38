"""Functions for all benchmarks: run the command line in its own process, describe the machine, write a page."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def fit(config: str, folder: Path, *options: str) -> None:
    """Run ``fit`` in its own process; its output is printed.

    Args:
        config: Name of a file in ``configs``.
        folder: Where the run is written.
        options: Further options, which override the file.

    Raises:
        SystemExit: If the run fails, with its exit code.
    """
    written = ["--trainer.default_root_dir", str(folder.resolve())]
    arguments = ["fit", "--config", str(ROOT / "configs" / config), *written, *options]
    process = subprocess.run([sys.executable, "-m", "lightning_fedssl", *arguments], cwd=ROOT, check=False)
    if process.returncode:
        raise SystemExit(process.returncode)


def machine() -> str:
    """A description of the machine: processor, cores, threads, and versions of Python and of the main packages."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "lightning"))
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return (
        f"{processor()}, {os.cpu_count()} CPU cores ({platform.machine()}), OMP_NUM_THREADS {threads}; "
        f"Python {platform.python_version()}, {packages}"
    )


def processor() -> str:
    """The processor's name; on Linux also family, model, and its instructions for vectors and bfloat16."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in text.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    if "flags" not in facts:
        return platform.processor() or platform.machine()
    flags = facts["flags"].split()
    kinds = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16"}
    known = " and ".join(name for flag, name in kinds.items() if flag in flags) or "no AVX2"
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']}; {known})"


def command(**options: object) -> str:
    """This benchmark's own command line, with these options."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])


def write(path: Path, lines: list[str]) -> None:
    """Write a Markdown file and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)
