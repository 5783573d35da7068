"""Every command in docs/ is run, in order, in one folder: a page that lies fails here."""

import os
import re
import subprocess
import sys
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


def test_files_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link
