"""One self-contained HTML page of a run: what was trained, how it went, what it can do. No scripts, nothing fetched."""

import base64
import json
import statistics
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import yaml

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.report.curves import draw_curves
from megatron_mlmclm.report.metrics import read_metrics, train_records, valid_records

RECIPE_FILE = "recipe.yaml"
FIGURE_FILE = "curves.png"
SCORES = ("mlm_loss", "unigram_loss", "mask_top1", "unigram_top1", "positions")
STYLESHEET = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 58rem;
       margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .6rem; }
p.lead, p.note { color: #66727f; margin: 0 0 .25rem; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid #e3e7eb; }
thead th { color: #66727f; font-weight: 600; font-size: .88rem; }
tbody th { font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0 0; }
.numbers div { flex: 1 1 9rem; background: #f4f6f8; border-radius: .5rem; padding: .7rem .9rem; }
.numbers b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.numbers span { color: #66727f; font-size: .88rem; }
.sentence { margin: 0 0 1rem; }
.sentence mark { background: #fde6d8; color: inherit; border-radius: .25rem; padding: 0 .3rem; }
.fill { display: inline-block; margin: .3rem .4rem 0 0; padding: .05rem .55rem; border-radius: 1rem;
        background: #eaf3f9; font-size: .92rem; }
.fill i { color: #66727f; font-style: normal; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; font-weight: 600; }
pre { background: #f4f6f8; border-radius: .5rem; padding: 1rem; overflow-x: auto; font-size: .85rem;
      line-height: 1.45; }
"""


def write_report(run_dir: Path, fill_mask_json: Path | None, output: Path) -> None:
    """Write the page of `run_dir` to `output`, and its figure as curves.png beside it.

    UserError: metrics, recipe or `fill_mask_json` missing or damaged (file and line named), or no room to write.
    """
    metrics = read_metrics(run_dir)
    recipe, recipe_text = read_recipe(run_dir / RECIPE_FILE)
    scores = read_scores(fill_mask_json) if fill_mask_json else None
    figure = output.with_name(FIGURE_FILE)
    reference = ("unigram guess", scores["unigram_loss"]) if scores else None
    draw_curves(metrics, figure, reference=reference)
    name = str(recipe.get("name") or run_dir.resolve().name)
    sections = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="lead">{escape(describe(recipe, metrics))}</p>',
        headline_numbers(metrics, scores),
        "<h2>Curves</h2>",
        f'<img alt="Loss and learning rate by step" src="data:image/png;base64,{in_base64(figure)}">',
        validation_section(metrics, scores),
        fills_section(scores["sentences"]) if scores and scores.get("sentences") else "",
        recipe_section(recipe),
        f"<h2>Resolved recipe</h2>\n<details><summary>{RECIPE_FILE}</summary>",
        f"<pre>{escape(recipe_text)}</pre></details>",
    ]
    write_file(output, page(name, sections).encode())


# ---------------------------------------------------------------------------------------------------------- reading


def read_recipe(path: Path) -> tuple[dict[str, Any], str]:
    """(the recipe as a mapping, its text). UserError: missing, not YAML, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; name the folder that `mlmclm train` wrote") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot read it as YAML ({error})") from error
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: must be a mapping of keys, as `mlmclm train` writes it")
    return recipe, text


def read_scores(path: Path) -> dict[str, Any]:
    """What `mlmclm fill-mask --output` wrote. UserError: missing, not JSON, a score that is missing or no number."""
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; write it with `mlmclm fill-mask ... --output {path.name}`") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read it as JSON ({error})") from error
    wrong = [key for key in SCORES if not isinstance(scores, dict) or not isinstance(scores.get(key), int | float)]
    if wrong:
        raise UserError(f"{path}: key {wrong[0]} is missing or no number; write it with `mlmclm fill-mask --output`")
    return scores


def in_base64(path: Path) -> str:
    """A file's bytes as base64 text."""
    return base64.b64encode(path.read_bytes()).decode("ascii")


# --------------------------------------------------------------------------------------------------------- sections


def describe(recipe: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    """One line under the title: the phases as trained, and the seed."""
    steps = train_records(metrics)
    objectives: dict[int, list[str]] = {}
    for record in steps:
        objectives.setdefault(record["phase"], []).append(record["objective"].upper())
    phases = ", then ".join(f"{names[0]} for {len(names):,} steps" for names in objectives.values())
    return phases + (f"; seed {recipe['seed']}" if "seed" in recipe else "")


def headline_numbers(metrics: list[dict[str, Any]], scores: dict[str, Any] | None) -> str:
    """The few numbers a reader looks for first, timings among them."""
    steps = train_records(metrics)
    # From the first record to the last: a run that was stopped and resumed later counts the pause, too.
    wall = max(r["time"] for r in metrics) - min(r["time"] for r in metrics)
    numbers = [
        (f"{steps[-1]['step']:,}", "steps"),
        (f"{steps[-1]['samples']:,}", "samples"),
        (f"{steps[-1]['loss']:.3f}", f"last {steps[-1]['objective'].upper()} training loss"),
        (f"{statistics.median(r['tokens_per_s'] for r in steps):,.0f}", "tokens/s, median step"),
        (duration(wall), "wall time, first step to last"),
    ]
    if scores:
        numbers.append((f"{scores['mask_top1']:.1%}", f"masks right (unigram {scores['unigram_top1']:.1%})"))
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in numbers)
    return f'<div class="numbers">{boxes}</div>'


def duration(seconds: float) -> str:
    """Seconds as "1 h 02 min", "3 min 05 s" or "12 s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def validation_section(metrics: list[dict[str, Any]], scores: dict[str, Any] | None) -> str:
    """Last and best losses, accuracies, perplexities, and the exported encoder against the unigram guess."""
    records = valid_records(metrics)
    rows = []
    for name in sorted({name for record in records for name in record["losses"]}):
        points = [(record["losses"][name], record["step"]) for record in records if name in record["losses"]]
        (last, step), (best, at) = points[-1], min(points)
        right = records[-1].get("accuracies", {}).get(name)
        shown = "" if right is None else f"{right:.1%}"
        rows.append([name.upper(), f"{last:.3f} (step {step:,})", f"{best:.3f} (step {at:,})", shown])
    perplexities = records[-1].get("perplexities", {}) if records else {}
    rows += [[f"{name} perplexity", f"{value:,.1f}", "", ""] for name, value in perplexities.items()]
    parts = ["<h2>Validation</h2>"]
    if rows:
        parts.append(table(["", "last loss", "best loss", "right, last"], rows, numbers=True))
    if scores:
        parts.append(
            f'<p class="note">Filling {scores["positions"]:,} masked tokens of held-out text; losses in nats.</p>'
        )
        model = ["exported encoder", f"{scores['mlm_loss']:.3f}", f"{scores['mask_top1']:.1%}"]
        guess = ["unigram guess", f"{scores['unigram_loss']:.3f}", f"{scores['unigram_top1']:.1%}"]
        parts.append(table(["", "loss", "right at first guess"], [model, guess], numbers=True))
    return "\n".join(parts) if len(parts) > 1 else ""


def fills_section(sentences: list[dict[str, Any]]) -> str:
    """Each sentence with its mask set off, and the likeliest fills under it."""
    parts = ["<h2>Filled sentences</h2>"]
    for sentence in sentences:
        text = escape(str(sentence["text"])).replace("[MASK]", "<mark>[MASK]</mark>")
        fills = "".join(
            f'<span class="fill">{escape(str(fill["token"]))} <i>{fill["score"]:.0%}</i></span>'
            for fill in sentence["fills"]
        )
        parts.append(f'<p class="sentence">{text}<br>{fills}</p>')
    return "\n".join(parts)


def recipe_section(recipe: dict[str, Any]) -> str:
    """What was trained: a row a key of the recipe, and a table of the phases."""
    rows = [[key, compact(value)] for key, value in recipe.items() if key != "phases" and value not in (None, {}, [])]
    parts = ["<h2>What was trained</h2>", table(["", ""], rows)]
    phases = [phase for phase in recipe.get("phases") or [] if isinstance(phase, dict)]
    if phases:
        keys = list(dict.fromkeys(key for phase in phases for key, value in phase.items() if value is not None))
        cells = [
            [str(place), *(compact(phase.get(key)) for key in keys)] for place, phase in enumerate(phases, start=1)
        ]
        parts.append(table(["phase", *keys], cells))
    return "\n".join(parts)


def compact(value: Any) -> str:
    """A recipe's value in one line: mappings as "key value, key value", what is not set left out."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {nested(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return ", ".join(compact(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def nested(value: Any) -> str:
    """`compact`, in brackets where the value has parts of its own."""
    return f"({compact(value)})" if isinstance(value, dict | list) else compact(value)


def table(heads: list[str], rows: Iterable[list[str]], *, numbers: bool = False) -> str:
    """An HTML table, all escaped; the first cell of a row is its heading. `numbers`: the other cells stand right."""
    kind = ' class="number"' if numbers else ""
    cells = [f"<th{kind if place else ''}>{escape(head)}</th>" for place, head in enumerate(heads)]
    head = f"<thead><tr>{''.join(cells)}</tr></thead>" if any(heads) else ""
    body = "\n".join(
        f"<tr><th>{escape(str(row[0]))}</th>{''.join(f'<td{kind}>{escape(str(cell))}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def page(title: str, sections: list[str]) -> str:
    """The whole document."""
    body = "\n".join(section for section in sections if section)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLESHEET}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
