"""What the benches share: rounds of ours and the peer's in turns, their ratio, and where it is told.

A result is {case, ours, peer, unit, ratio, ratio_min, ratio_max}: medians of ours and the peer's, and the median, least
and largest of the rounds' ratios. A ratio is always ours / peer in the unit shown: where that is a rate (it ends in /s)
higher is better, else lower.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEADING = "ratio = ours / peer: of rates (.../s) higher is better, of all else lower"
Step = Callable[[], Any]


def make_parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with what every bench takes: --rounds and --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"of ours and the peer's in turns ({rounds})")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser


def compared(case: str, unit: str, pairs: list[tuple[float, float]]) -> dict:
    """The result of rounds, each (ours, peer) in `unit`."""
    ratios = [ours / peer if peer else float("nan") for ours, peer in pairs]
    ours, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    spread = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return {"case": case, "ours": ours, "peer": peer, "unit": unit, **spread}


def in_turns(ours: Step, peer: Step, rounds: int, measure: Callable[[Step], float]) -> list[tuple[float, float]]:
    """What `measure` says of each, round by round."""
    return [(measure(ours), measure(peer)) for _ in range(rounds)]


def measured(case: str, ours: Step, peer: Step, rounds: int) -> Iterator[dict]:
    """Milliseconds and megabytes of one case."""
    for step in (ours, peer):  # the first of all makes masks, the kernels' threads and gradients
        step()
    yield compared(case, "ms", in_turns(ours, peer, rounds, lambda step: seconds(step) * 1e3))
    with no_memory_kept():
        yield compared(case, "MB", in_turns(ours, peer, rounds, lambda step: peak(step) / 1e6))


def tell(results: Iterator[dict] | list[dict], path: Path | None) -> None:
    """Print each result as it comes, and write all of them to `path` at the end."""
    print(HEADING)
    print(f"{'case':56}{'ours':>12}{'peer':>12} {'unit':8}{'ratio':>8}{'least':>8}{'most':>8}")
    told = []
    for result in results:
        told.append(result)
        row = "{case:56}{ours:12,.4g}{peer:12,.4g} {unit:8}{ratio:8.3g}{ratio_min:8.3g}{ratio_max:8.3g}"
        print(row.format(**result), flush=True)
    if path:
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def fresh(script: str, *arguments: str) -> list[str]:
    """The words of the last line that `script` prints in a process of its own. SystemExit where that fails."""
    command = [sys.executable, script, *arguments]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1].split()


def seconds(step: Step) -> float:
    """How long one step takes; on a CPU the time of all threads, which other work on the machine changes little."""
    import torch

    if not torch.cuda.is_available():
        return cpu_seconds(step)
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def cpu_seconds(step: Step) -> float:
    """Processor time of one step, all threads."""
    began = time.process_time()
    step()
    return time.process_time() - began


def peak(step: Step) -> int:
    """Bytes that one step needs at once beside what was there."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what the heap still has of the last step would not be counted in this one
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


@contextlib.contextmanager
def no_memory_kept() -> Iterator[None]:
    """Freed tensors go back to the system at once (glibc), so that the peak of the process is that of a step."""
    from megatron_mlmclm.platform.cpu import keep_memory

    threshold, most = -3, -4  # M_MMAP_THRESHOLD, M_MMAP_MAX
    libc = ctypes.CDLL(None)
    libc.mallopt(threshold, 16 * 1024)
    libc.mallopt(most, 2**31 - 1)
    yield
    keep_memory()  # as in training


def resident(name: str, pid: int | str = "self") -> int:
    """Memory of a process by its name in /proc/PID/status (VmRSS, VmHWM, RssAnon), bytes; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:")), 0)
