"""`mlmclm doctor`: what this machine has, which parts a run would use, and the known traps with their mends.

Three steps, so that the judgement can be tested on machines nobody has: `collect_facts` looks, `choose_parts` and
`find_traps` are pure functions of the facts, `run` prints. Neither megatron (8 s) nor Transformer Engine is imported:
package metadata, module look-ups and torch answer everything.
"""

import argparse
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "apex",
    "nvidia-resiliency-ext",
    "tensorboard",
    "psutil",
)
# NVRX_MIN_VERSION in megatron/core/dist_checkpointing/strategies/nvrx.py, which `import megatron.core` asserts as soon
# as the package's async_ckpt modules import. A test compares the two.
RESILIENCY_MIN = "0.6.0"
MIN_PYTHON = "3.12"
GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One CUDA device; memory in GiB."""

    name: str
    memory_gib: float
    bf16: bool


@dataclass(frozen=True)
class Facts:
    """What was seen on this machine. Versions are None where the package is not installed."""

    python: str = "3.12.0"
    versions: dict[str, str | None] = field(default_factory=dict)
    tested: dict[str, str] = field(default_factory=dict)  # package -> range our own metadata asks for
    torch_error: str | None = None  # why `import torch` failed, one line
    has_te: bool = False  # transformer_engine.pytorch can be found
    apex_is_nvidia: bool = False  # apex/optimizers and the amp_C extension are both there
    devices: tuple[Device, ...] = ()
    cpu_bf16: str | None = None  # the instruction set that does bf16, None: emulated
    cores: int = 1
    memory_gib: float = 0.0
    processes: int = 1  # training processes expected on this machine
    omp_num_threads: str | None = None


@dataclass(frozen=True)
class Trap:
    """A known problem, and its mend, in one line. A fatal one keeps training from starting."""

    text: str
    fatal: bool = False


# ---------------------------------------------------------------------------------------------------------- looking


def collect_facts(processes: int | None = None) -> Facts:
    """Look at this machine (about 2 s: torch is imported). `processes` None: taken from the launcher's environment."""
    devices, torch_error = cuda_devices()
    versions = {name: installed_version(name) for name in PACKAGES}
    versions["DALI"] = dali_version()
    return Facts(
        python=platform.python_version(),
        versions=versions,
        tested=tested_ranges(),
        torch_error=torch_error,
        has_te=has_file("transformer_engine", "pytorch"),
        apex_is_nvidia=has_nvidia_apex(),
        devices=devices,
        cpu_bf16=bf16_instructions(cpu_flags()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        processes=processes or expected_processes(len(devices)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
    )


def installed_version(package: str) -> str | None:
    """The version in the package's metadata, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dali_version() -> str | None:
    """DALI's version; its distribution's name carries the CUDA version (nvidia-dali-cuda130)."""
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-").startswith("nvidia-dali-cuda"):
            return distribution.version
    return None


def tested_ranges() -> dict[str, str]:
    """Package -> version range, from setup.py's install_requires; empty when run from a bare checkout."""
    try:
        lines = metadata.requires("megatron_mlmclm") or []
    except metadata.PackageNotFoundError:
        return {}
    needed = [Requirement(line) for line in lines if "extra ==" not in line]
    return {requirement.name: str(requirement.specifier) for requirement in needed}


def has_file(module: str, inside: str) -> bool:
    """Whether top-level `module` is found and holds a folder `inside`. It is not imported."""
    spec = find_spec(module)
    return spec is not None and any((Path(place) / inside).is_dir() for place in spec.submodule_search_locations or ())


def has_nvidia_apex() -> bool:
    """Whether NVIDIA's apex, with its extension, is there; PyPI's apex is another project."""
    return has_file("apex", "optimizers") and find_spec("amp_C") is not None


def has_liger() -> bool:
    """Whether Liger's kernels are there."""
    return has_file("liger_kernel", "transformers")


def cuda_devices() -> tuple[tuple[Device, ...], str | None]:
    """(the CUDA devices, why torch could not be imported or None)."""
    try:
        import torch
    except Exception as error:  # a broken install raises anything: OSError for a missing library, too
        return (), " ".join(f"{type(error).__name__}: {error}".split())[:200]
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(Device(properties.name, round(properties.total_memory / GIB, 1), properties.major >= 8))
    return tuple(found), None


def cpu_flags() -> set[str]:
    """The processor's feature flags as Linux lists them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(line.group(1).split()) if line else set()


def bf16_instructions(flags: set[str]) -> str | None:
    """The best bf16 instruction set among `flags` (x86: amx_bf16, avx512_bf16, avx_ne_convert; Arm: bf16), or None."""
    return next((name for name in ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16") if name in flags), None)


def expected_processes(devices: int) -> int:
    """Training processes on this machine: what torchrun or Slurm says, else one per CUDA device, at least 1."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or ""
    return int(said) if said.isdigit() else max(1, devices)


# ---------------------------------------------------------------------------------------------------------- judging


def choose_parts(facts: Facts) -> dict[str, str]:
    """Part of a run -> the implementation that would be used here."""
    cuda = bool(facts.devices)
    te = cuda and facts.has_te
    return {
        "platform": "CUDA, NCCL" if cuda else "CPU, gloo",
        "attention": "Transformer Engine" if te else "ours, on torch's scaled_dot_product_attention",
        "norm": "Transformer Engine, fused into the linear layers" if te else "ours, RMSNorm in torch",
        "optimizer": choose_optimizer(facts, te),
    }


def choose_optimizer(facts: Facts, te: bool) -> str:
    """The Adam that would be used, in the order in which megatron/core/optimizer tries them."""
    if not facts.devices:
        return "ours, CPU Adam (torch's fused AdamW, Megatron's checkpoint layout)"
    if te:
        return "Megatron's fused Adam (Transformer Engine)"
    return "Megatron's fused Adam (apex)" if facts.apex_is_nvidia else "torch AdamW"


def find_traps(facts: Facts) -> list[Trap]:
    """The known traps that `facts` walk into, fatal ones first."""
    traps = [*required_traps(facts), *range_traps(facts), *optional_traps(facts), *process_traps(facts)]
    return sorted(traps, key=lambda trap: not trap.fatal)


def required_traps(facts: Facts) -> list[Trap]:
    """Traps of what every run needs: Python, torch, megatron-core, transformers, tensorboard, psutil."""
    traps = []
    if older(facts.python, MIN_PYTHON):
        text = f"Python {facts.python} is older than {MIN_PYTHON}, which megatron-core needs: run tools/setup_env.sh"
        traps.append(Trap(text, fatal=True))
    for name in ("torch", "megatron-core", "transformers"):
        if facts.versions.get(name) is None:
            traps.append(Trap(f"{name} is not installed: pip install -e . in the repository root", fatal=True))
    if facts.torch_error and facts.versions.get("torch"):
        text = f"torch is installed and does not import ({facts.torch_error}): pip install --force-reinstall torch"
        traps.append(Trap(text, fatal=True))
    if facts.versions.get("tensorboard") is None:
        text = "tensorboard is missing: megatron would write no scalars and only warn; pip install tensorboard"
        traps.append(Trap(text))
    if facts.versions.get("psutil") is None:
        text = "psutil is missing: megatron's checkpoint writer imports it, so saving would fail; pip install psutil"
        traps.append(Trap(text, fatal=True))
    return traps


def range_traps(facts: Facts) -> list[Trap]:
    """Installed packages outside the range that the tests ran against."""
    traps = []
    for name, wanted in facts.tested.items():
        version = facts.versions.get(name)
        if version and not Requirement(f"{name}{wanted}").specifier.contains(version, prereleases=True):
            traps.append(Trap(f"{name} {version} is outside the tested range: pip install '{name}{wanted}'"))
    return traps


def optional_traps(facts: Facts) -> list[Trap]:
    """Traps of packages a run can do without: apex, nvidia-resiliency-ext, Transformer Engine."""
    traps = []
    if facts.versions.get("apex") and not facts.apex_is_nvidia:
        text = "apex is not NVIDIA's (no apex.optimizers with amp_C; PyPI's is a web toolkit): pip uninstall apex, "
        traps.append(Trap(text + "and build NVIDIA's from source if you want it (docker/ does)"))
    resiliency = facts.versions.get("nvidia-resiliency-ext")
    if resiliency and older(resiliency, RESILIENCY_MIN):
        text = f"nvidia-resiliency-ext {resiliency} makes `import megatron.core` raise (it wants {RESILIENCY_MIN} or "
        traps.append(Trap(text + "newer, or none): pip uninstall nvidia-resiliency-ext", fatal=True))
    if facts.has_te and not facts.devices:
        text = "Transformer Engine is installed and there is no CUDA device: the CPU platform hides it, FP8 and its "
        traps.append(Trap(text + "kernels are not used; nothing to do, unless you expected a GPU (nvidia-smi)"))
    return traps


def process_traps(facts: Facts) -> list[Trap]:
    """Traps of several processes on one machine."""
    if facts.processes < 2 or facts.omp_num_threads:
        return []
    threads = max(1, facts.cores // facts.processes)
    text = f"OMP_NUM_THREADS is unset with {facts.processes} processes on {facts.cores} cores (torchrun then sets 1, "
    return [Trap(text + f"srun leaves every process all cores): export OMP_NUM_THREADS={threads}")]


def older(version: str, least: str) -> bool:
    """Whether `version` is before `least`; a version that no rule can read is not called old."""
    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return False


# --------------------------------------------------------------------------------------------------------- printing


def machine_rows(facts: Facts) -> list[tuple[str, str]]:
    """The table's first part: (what, what was found)."""
    rows = [("Python", facts.python)]
    rows += [(name, facts.versions.get(name) or "-") for name in ("torch", "megatron-core", "transformers")]
    rows.append(("transformer-engine", facts.versions.get("transformer-engine") or "-"))
    apex = facts.versions.get("apex") or ("no metadata" if facts.apex_is_nvidia else None)
    rows.append(("apex", f"{apex} ({'NVIDIA' if facts.apex_is_nvidia else 'not NVIDIA'})" if apex else "-"))
    rows.append(("DALI", facts.versions.get("DALI") or "-"))
    rows.append(("CUDA devices", str(len(facts.devices) or "none")))
    for index, device in enumerate(facts.devices):
        bf16 = "bf16" if device.bf16 else "no bf16"
        rows.append((f"  device {index}", f"{device.name}, {device.memory_gib:.0f} GiB, {bf16}"))
    rows.append(("bf16 on CPU", facts.cpu_bf16 or "emulated (right, but slower than fp32)"))
    rows.append(("cores, memory", f"{facts.cores}, {facts.memory_gib:.0f} GiB"))
    return rows


def print_facts(facts: Facts, traps: list[Trap], console: Console) -> None:
    """Print the table and, under it, one line a trap."""
    table = Table(title="mlmclm doctor", show_header=False, title_justify="left")
    for what, found in machine_rows(facts):
        table.add_row(escape(what), escape(found))
    table.add_section()
    for part, choice in choose_parts(facts).items():
        table.add_row(part, choice)
    console.print(table)
    for trap in traps:
        mark = "[bold red]fatal[/]" if trap.fatal else "[yellow]note[/]"
        # soft_wrap: one trap stays one line, for grep and for pasting its mend
        console.print(f"{mark}: {escape(trap.text)}", soft_wrap=True, highlight=False)
    if not traps:
        console.print("no known trap here")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print facts, parts and traps as JSON instead of a table")
    parser.add_argument("--processes", type=int, metavar="N", help="training processes you mean to run on this machine")


def run(args: argparse.Namespace) -> int:
    """Look, judge and print. Exit status 1 when a trap keeps training from starting, else 0."""
    facts = collect_facts(args.processes)
    traps = find_traps(facts)
    if args.json:
        parts = {"parts": choose_parts(facts), "traps": [asdict(trap) for trap in traps]}
        print(json.dumps(asdict(facts) | parts, indent=2))
    else:
        print_facts(facts, traps, Console())
    return int(any(trap.fatal for trap in traps))
