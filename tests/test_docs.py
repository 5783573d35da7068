"""Every command in docs/ is run, in order, in one folder: a page that lies fails here."""

import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from tests.conftest import ROOT

BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["data.md", "training.md", "export.md", "recipes.md"]


@pytest.mark.slow
def test_every_command_in_the_docs_runs(corpus, tmp_path):
    (tmp_path / "speeches.jsonl").write_bytes((corpus.folder / "train.jsonl").read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "PYTHONWARNINGS": "ignore"}
    ran = 0
    for page in PAGES:
        for kind, text in BLOCK.findall((ROOT / "docs" / page).read_text()):
            if kind == "yaml":
                (tmp_path / text.splitlines()[0].removeprefix("# file: ")).write_text(text)
                continue
            done = subprocess.run(
                ["bash", "-euc", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
            )
            assert done.returncode == 0, f"{page}: {text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            ran += 1
    assert ran == 12
    assert (tmp_path / "encoder" / "model.safetensors").is_file()


def test_every_key_of_a_recipe_is_in_its_page():
    from megatron_mlmclm.recipe.schema import Recipe

    page = (ROOT / "docs" / "recipes.md").read_text()
    for name, field in Recipe.model_fields.items():
        assert f"`{name}`" in page
        section = field.annotation
        for key in getattr(section, "model_fields", {}):
            assert f"`{key}`" in page, f"{name}.{key}"


def test_keys_that_the_bridge_page_names_exist():
    from megatron_mlmclm.recipe.phase import PhaseSection
    from megatron_mlmclm.recipe.schema import Recipe

    def check(key: str) -> None:
        section = Recipe
        for name in key.replace("phases.0", "phases").split("."):
            fields = {field.alias or plain: field for plain, field in section.model_fields.items()}
            assert name in fields, key
            kind = fields[name].annotation
            section = PhaseSection if name == "phases" else next(iter(typing.get_args(kind)), kind)

    table = (ROOT / "docs" / "megatron-bridge.md").read_text().partition("## Fields")[2].partition("Overrides are")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for theirs, ours, *_ in rows:
        named = [key.partition(":")[0] for key in re.findall(r"`([^`]+)`", ours)]
        for key in named:
            if key.endswith("."):  # "`model.`, the same names"
                for name in re.findall(r"`([^`]+)`", theirs):
                    check(key + name.rpartition(".")[2])
            elif key not in ("documents", "packed", "shape", "{path, weight}"):
                check(key)


def test_files_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link
