#!/usr/bin/env python3
"""Results of benches as a Markdown table.

    python tools/bench/table.py FILE.json... > table.md

One row per result, in the order of the files. A ratio is ours / peer, with the least and largest of the rounds.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

KEYS = {"case", "ours", "peer", "unit", "ratio", "ratio_min", "ratio_max"}


def main() -> None:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what a bench wrote with --json")
    results = [result for path in parser.parse_args().files for result in read(path)]
    print("| comparison | ours | peer | unit | ours / peer (least to most) | better |")
    print("| --- | ---: | ---: | --- | ---: | --- |")
    for result in results:
        print(row(result))


def read(path: Path) -> list[dict[str, Any]]:
    """The results in a file. Leaves with one line and status 2 where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if all(set(result) >= KEYS for result in found):
            return found
        problem = f"no list of results with {', '.join(sorted(KEYS))}"
    except (OSError, ValueError, TypeError) as error:
        problem = str(error)
    print(f"table: error: {path}: {problem}", file=sys.stderr)
    sys.exit(2)


def row(result: dict[str, Any]) -> str:
    """One line of Markdown."""
    spread = f"**{figure(result['ratio'])}** ({figure(result['ratio_min'])} to {figure(result['ratio_max'])})"
    better = "higher" if result["unit"].endswith("/s") else "lower"
    cells = (result["case"], figure(result["ours"]), figure(result["peer"]), result["unit"], spread, better)
    return f"| {' | '.join(cells)} |"


def figure(number: float) -> str:
    """Three digits, without an exponent; thousands are told apart."""
    if number == 0 or number != number:
        return f"{number:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{digits}f}"


if __name__ == "__main__":
    main()
