"""Real figures and pages of made-up runs."""

import argparse
import base64
import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.report import html, verb
from megatron_mlmclm.report.curves import draw_curves, smooth
from megatron_mlmclm.report.metrics import read_metrics, train_records

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br"}
RECIPE = {
    "name": "tiny <script>alert(1)</script>",
    "seed": 17,
    "model": {"num_layers": 2, "hidden_size": 64},
    "data": {"train": [{"prefix": "a & b", "weight": 1.0}], "tokenizer": None},
    "phases": [{"objective": "clm", "steps": 20}, {"objective": "mlm", "steps": 10, "mask_ratio": 0.4}],
}
SCORES = {
    "mlm_loss": 3.21,
    "unigram_loss": 6.71,
    "mask_top1": 0.382,
    "unigram_top1": 0.061,
    "positions": 2412,
    "sentences": [{"text": "a <i>[MASK]</i> b", "fills": [{"token": "<b>", "score": 0.5}]}],
}


def train_record(step: int, phase: int, objective: str) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "phase": phase,
        "objective": objective,
        "loss": 10.0 / step**0.5,
        "lr": 1e-3 / step,
        "grad_norm": 1.0,
        "tokens_per_s": 1000.0 + step,
        "samples": 8 * step,
        "time": 1.7e9 + 2.0 * step,
    }


def records(steps: tuple[int, ...] = (20, 10)) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for phase, count in enumerate(steps):
        for _ in range(count):
            found.append(train_record(len(found) + 1, phase, "mlm" if phase else "clm"))
    valid = [
        {"kind": "valid", "step": step, "phase": 1, "losses": {"mlm": 3.0 + 1 / step}, "time": 1.7e9 + 2 * step}
        for step in (25, 30)
    ]
    return found + valid


def write_run(folder: Path, metrics: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in metrics or records()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


class Page(HTMLParser):
    """Collects tags and attributes, and checks that every element that opens is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("steps", [(20, 10), (1,), (30,), (5, 1), (3, 3, 3)])
def test_curves_of_any_number_of_phases(tmp_path: Path, steps: tuple[int, ...]):
    draw_curves(records(steps), tmp_path / "c.png", tmp_path / "c.svg")
    assert (tmp_path / "c.png").read_bytes().startswith(PNG_MAGIC)
    assert "</svg>" in (tmp_path / "c.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.png", "c.svg"]


def test_curves_survive_a_diverged_run(tmp_path: Path):
    metrics = records()
    for record in metrics[10:]:
        if record["kind"] == "train":
            record["loss"] = float("nan")
    draw_curves(metrics, tmp_path / "c.png", reference=("unigram guess", 6.7))
    assert (tmp_path / "c.png").read_bytes().startswith(PNG_MAGIC)


def test_smooth_averages_what_is_in_reach_and_passes_over_what_is_not_finite():
    assert smooth(np.arange(10.0), 5) == pytest.approx([1.0, 1.5, *range(2, 8), 7.5, 8.0])
    assert smooth(np.array([1.0, np.inf, 3.0]), 3) == pytest.approx([1.0, 2.0, 3.0])
    assert np.isnan(smooth(np.array([np.nan]), 3)).all()


def test_page_is_self_contained_and_escaped(tmp_path: Path):
    run_dir = write_run(tmp_path / "run")
    scores = tmp_path / "fill.json"
    scores.write_text(json.dumps(SCORES))
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    output = tmp_path / "out" / "report.html"
    verb.run(parser.parse_args([str(run_dir), "--fill-mask", str(scores), "--output", str(output)]))
    text = output.read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.seen]
    assert "script" not in tags
    assert "i" in tags  # the fills' scores; the sentence's own <i> is text
    assert "a <i>[MASK]</i> b" in page.text
    assert RECIPE["name"] in page.text
    assert not re.search(r"(src|href)\s*=", re.sub(r'src="data:', "", text))
    (image,) = (attrs["src"] for tag, attrs in page.seen if tag == "img")
    inlined = base64.b64decode(image.removeprefix("data:image/png;base64,"))
    assert inlined.startswith(PNG_MAGIC)
    assert inlined == (output.parent / "curves.png").read_bytes()
    for shown in ("6.710", "38.2%", "2,412", "1,016", "58 s", "CLM for 20 steps, then MLM for 10 steps; seed 17"):
        assert shown in page.text, shown


def test_page_without_scores_or_validations(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", [record for record in records() if record["kind"] == "train"])
    html.write_report(run_dir, None, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert "unigram" not in page.text
    assert "Validation" not in page.text


def test_accuracies_and_perplexities_are_told(tmp_path: Path):
    metrics = records()
    metrics[-1] |= {"accuracies": {"mlm": 0.4567}, "perplexities": {"pseudo": 12.34}}
    page = html.write_report(write_run(tmp_path / "run", metrics), None, tmp_path / "report.html")
    text = (page or tmp_path / "report.html").read_text()
    assert "45.7%" in text
    assert "pseudo perplexity" in text
    assert "12.3" in text


def test_a_step_done_again_after_a_resume_counts_once():
    metrics = records()
    again = copy.deepcopy(metrics[4])
    again["loss"] = 1.25
    steps = train_records([*metrics, again])
    assert len(steps) == 30
    assert steps[4]["loss"] == 1.25


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"kind": "train", "step": 3', r"metrics\.jsonl, line 2: .*JSON"),
        ('{"kind": "other", "step": 3}', r"metrics\.jsonl, line 2: .*other"),
        (json.dumps(train_record(2, 0, "clm") | {"loss": "x"}), r"metrics\.jsonl, line 2: loss: "),
    ],
)
def test_bad_metrics_name_file_and_line(tmp_path: Path, line: str, expected: str):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train_record(1, 0, "clm")) + "\n" + line + "\n")
    with pytest.raises(UserError, match=expected):
        read_metrics(tmp_path)


def test_missing_or_empty_inputs_end_in_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no training step"):
        read_metrics(tmp_path)
    run_dir = write_run(tmp_path / "run")
    (tmp_path / "fill.json").write_text('{"mlm_loss": 1.0}')
    with pytest.raises(UserError, match=r"fill\.json: key unigram_loss"):
        html.write_report(run_dir, tmp_path / "fill.json", tmp_path / "report.html")
    (run_dir / "recipe.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"recipe\.yaml: cannot read it as YAML"):
        html.write_report(run_dir, None, tmp_path / "report.html")
