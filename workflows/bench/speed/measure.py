"""Time in interleaved rounds, and memory of each call in a fresh process."""

import ctypes
import gc
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from speed.cases import Agreement, Call, Case, Limit, Row, Spec

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOADED_FIRST = ("scanpy", "harmonypy", "sklearn.decomposition", "torch", "zarr", "imagecodecs", "cellica.encoder")


def row(spec: Spec, folder: Path, *, memory: bool = True) -> Row:
    """Measure one row; ``folder`` keeps the files that its cases share."""
    times: list[list[float]] = []
    processor: list[list[float]] = []
    agreements: list[Agreement] = []
    for seed in range(spec.seeds):
        case = spec.case(folder, seed)
        limits = [limit for limit in case.limits if limit.call]
        calls = [case.ours, case.peer, *(limit.call for limit in limits if limit.call)]
        results = rounds(calls, spec.rounds, times, processor)
        agreements.append(case.agreement(*results[:2]))
    seconds, cpu = np.median(times, axis=0), np.median(processor, axis=0)
    return Row(
        spec.row,
        case.size,
        ours_s=float(seconds[0]),
        peer_s=float(seconds[1]),
        ours_mib=added_memory(spec, folder, "ours") if memory else np.nan,
        peer_mib=added_memory(spec, folder, "peer") if memory else np.nan,
        limit=fractions(case, seconds),
        quality=quality(spec, agreements, np.array(times), float(cpu[1] / cpu[0])),
    )


def rounds(
    calls: Sequence[Call], n: int, times: list[list[float]], processor: list[list[float]] | None = None
) -> list[Any]:
    """Make all calls in turn, ``n`` times; add the seconds of each round to ``times``, and give the last results."""
    for _ in range(n):
        wall, cpu, results = [], [], []
        for call in calls:
            start, start_cpu = time.perf_counter(), time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of convergence: both sides say it, and `quality` says more
                results.append(call())
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        times.append(wall)
        if processor is not None:
            processor.append(cpu)
    return results


def fractions(case: Case, seconds: np.ndarray) -> dict[str, float]:
    """Seconds of each limit over ours; ``seconds`` are ours, the peer's and those of limits that have a call."""
    own = iter(seconds[2:])
    return {
        limit.name: float(limit.scale * (next(own) if limit.call else seconds[1]) / seconds[0]) for limit in case.limits
    }


def quality(spec: Spec, agreements: Sequence[Agreement], times: np.ndarray, cpu: float) -> str:
    """The worst agreement, the ratios' range, the ratio in CPU time where it is another one, and the row's remark."""
    worst = max(agreements, key=lambda one: (not one.holds, one.error))
    ratios = times[:, 1] / times[:, 0]
    parts = [
        ("" if worst.holds else "DISAGREES: ") + worst.text + (f" (worst of {spec.seeds} seeds)" * (spec.seeds > 1)),
        f"ratio {ratios.min():.3g} to {ratios.max():.3g}" if len(ratios) > 1 else "",
        f"in CPU time {cpu:.3g}" if np.isfinite(cpu) and abs(np.log(cpu / np.median(ratios))) > np.log(1.1) else "",
        spec.remark,
    ]
    return "; ".join(part for part in parts if part)


# ------------------------------------------------------------------------------------------------------ memory


def added_memory(spec: Spec, folder: Path, side: str) -> float:
    """Most MiB that the call of one side adds, in a process that has done nothing else; NaN where Linux's /proc is not."""
    return in_fresh_process(_peak_of_case, spec, folder, side)


def in_fresh_process(function: Callable[..., float], *arguments: Any) -> float:
    """The function's result, from a process forked off one that has libraries loaded and has called none of them."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(list(LOADED_FIRST))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def _peak_of_case(spec: Spec, folder: Path, side: str) -> float:
    """A small call goes first: modules that the call loads and threads that it starts are no part of what it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if spec.small:
            (folder / "small").mkdir(exist_ok=True)
            getattr(spec.build(folder / "small", 0, **spec.small), side)()
        return peak(getattr(spec.case(folder), side))


def peak(call: Call) -> float:
    """Most MiB that this process held during the call, over what it held before; NaN where /proc does not say.

    Memory that the allocator keeps from before would hide the call's own, so it is given back first.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5")
    except (OSError, AttributeError):
        return float("nan")
    before = _status("VmRSS")
    result = call()  # held until the peak is read
    most = _status("VmHWM")
    del result
    return most - before


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    return int(found[1]) / 1024 if found else float("nan")


# ------------------------------------------------------------------------------------------------------ limits


def gemm(name: str, m: int, k: int, n: int, operations: float, dtype: str = "float32", repeats: int = 1) -> Limit:
    """The rate of products (m, k) x (k, n), of which the row needs ``operations``."""
    import torch

    a, b = torch.rand(m, k, dtype=getattr(torch, dtype)), torch.rand(k, n, dtype=getattr(torch, dtype))
    out = torch.empty(m, n, dtype=a.dtype)

    def call() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return Limit(name, call, operations / (2.0 * m * k * n * repeats))


def memcpy(n_bytes: int, buffer: int = 64 * 2**20) -> Limit:
    """Copying as many bytes, in pieces that no cache holds."""
    buffer = min(buffer, n_bytes)
    source, target = np.ones(buffer, np.uint8), np.zeros(buffer, np.uint8)

    def call() -> None:
        for _ in range(-(-n_bytes // buffer)):
            np.copyto(target, source)

    return Limit("memcpy", call, n_bytes / (buffer * -(-n_bytes // buffer)))
