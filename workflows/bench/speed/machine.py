"""What a table was measured on, without names of hosts, people or folders."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from threadpoolctl import threadpool_info

from cellica import __version__

FLAGS = ("fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
PEERS = ("scikit-learn", "python-picard", "copairs", "harmonypy", "scanpy", "zarr", "imagecodecs", "pandas")
BUSY = 1.0  # load average of the last minute at the start


def describe() -> dict[str, str]:
    """Lines for a table's header, in order."""
    import torch

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    cpu, flags = processor()
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cellica": " ".join([__version__, commit()]).strip(),
        "cpu": cpu,
        "flags": " ".join(flags) or "unknown",
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": memory(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}",
        "python": platform.python_version(),
        "numpy": f"{version('numpy')}, {blas()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "peers": ", ".join(f"{name} {installed(name)}" for name in PEERS),
        "load at the start": f"{load:.2f}",
    }
    if load > BUSY:
        found["BUSY"] = "other programs were running: the times and ratios are disturbed"
    return found


def is_busy(machine: dict[str, str]) -> bool:
    return "BUSY" in machine


def processor() -> tuple[str, list[str]]:
    """Name of the CPU, and those of its instructions that products and codecs use."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), []
    fields = dict(
        (part.strip() for part in line.split(":", 1))
        for line in info.read_text().split("\n\n")[0].splitlines()
        if ":" in line
    )
    present = set(fields.get("flags", fields.get("Features", "")).split())
    return fields.get("model name", platform.machine()), [flag for flag in FLAGS if flag in present]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> str:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return "unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def blas() -> str:
    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return "; ".join(
        f"{pool['internal_api']} {pool['version']} ({pool.get('architecture', 'unknown')}), {pool['num_threads']} threads"
        for pool in found
    )


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def commit() -> str:
    """Short commit of this checkout, with a + where files differ from it; empty outside of one."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return ""
