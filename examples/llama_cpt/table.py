"""Both recipes side by side, and the model before them.

python table.py OUTPUT
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROWS = {"before": "as imported", "mlm": "MLM only", "biphasic": "CLM, then MLM"}


def main(work: Path) -> None:
    table = Table(title="SmolLM2-135M as an encoder, on held-out text", title_justify="left")
    for heading in ("recipe", "MLM loss in transformers", "right at top 1"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for name, what in ROWS.items():
        found = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
        table.add_row(what, f"{found['mlm_loss']:.3f}", f"{found['mask_top1']:.1%}")
    table.add_row("unigram guess", f"{found['unigram_loss']:.3f}", f"{found['unigram_top1']:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
