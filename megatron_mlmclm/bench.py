"""`mlmclm bench`: compare us with peers on this machine, by the scripts in a checkout's tools/bench.

A script takes `--json FILE` and exits with 0, or with 2 where this machine cannot run it, which it says in one line.
One that is not there yet is left out, so a new one needs no more than its file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_mlmclm.errors import EXIT_USER_ERROR, UserError

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("step", "masking", "startup", "loss-memory", "loop", "preprocess", "attention", "convert", "loader")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(NAMES)}; without: all that can run here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.set_defaults(passes_on=True)
    parser.epilog = "After NAME also the options of tools/bench/NAME.py, such as --rounds."


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 2 for a user's mistake or a bench that cannot run here, 1 for one that failed."""
    there = find_scripts(ROOT / "tools" / "bench")
    if args.name:
        written = ["--json", str(args.json)] if args.json else []
        return call(script_of(args.name, there), [*written, *args.extra])
    if args.extra:
        raise UserError(f"{args.extra[0]}: an option of one bench; name it: {', '.join(there)}")
    return run_all(there, args.json)


def find_scripts(folder: Path) -> dict[str, Path]:
    """The scripts there are, by name. UserError without a checkout around the package."""
    if not folder.is_dir():
        raise UserError("benches are not installed with the package; run them in a checkout, which has tools/bench")
    paths = {name: folder / f"{name.replace('-', '_')}.py" for name in NAMES}
    return {name: path for name, path in paths.items() if path.is_file()}


def script_of(name: str, there: dict[str, Path]) -> Path:
    """UserError for an unknown name, or one whose script is not in this checkout."""
    if name not in NAMES:
        raise UserError(f"no bench {name!r}; there are: {', '.join(there)}")
    if name not in there:
        raise UserError(f"bench {name} is not in this checkout, which has: {', '.join(there)}")
    return there[name]


def run_all(there: dict[str, Path], path: Path | None) -> int:
    """One after the other; results of those that ran, in one list, at `path`. 1 if any failed, else 0."""
    results, failed, cannot = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, script in there.items():
            print(f"== {name}", flush=True)
            written = Path(folder) / f"{name}.json"
            status = call(script, ["--json", str(written)])
            if status == EXIT_USER_ERROR:
                cannot.append(name)
            elif status:
                failed.append(name)
            else:
                results += json.loads(written.read_text(encoding="utf-8"))
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    absent = [name for name in NAMES if name not in there]
    for names, what in ((cannot, "cannot run here"), (absent, "not in this checkout"), (failed, "failed")):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 1 if failed else 0


def call(script: Path, arguments: list[str]) -> int:
    """The exit status of `script`, in a process of its own with this checkout's package."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, str(script), *arguments], env=environment).returncode
