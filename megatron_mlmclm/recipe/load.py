"""A recipe file and `key=value` overrides -> a `Recipe`, or one line that says what is wrong and how to mend it."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.recipe.phase import TAGS
from megatron_mlmclm.recipe.schema import Recipe

PRESETS = Path(__file__).parent / "presets"


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the YAML file (or preset) at `path`, apply `a.b.0.c=value` overrides (values are YAML), and validate.

    Of a run that starts from a Hugging Face folder, or from one imported, `model` is filled in from there.

    Raises:
        UserError: the file is missing or no mapping, a key is unknown (the nearest known key is named), a value is off.
    """
    values = _read(find_recipe(path))
    for override in overrides:
        _apply(values, override)
    source = _source(values.get("start"), values.get("output"))
    if source is not None:
        values["model"] = _model_of(source, values.get("model") or {})
    return parse_recipe(values, str(path))


def _source(start: Any, output: Any) -> str | None:
    """Where the config of the Hugging Face model lies that a run starts from, imported or not.

    A run that has begun in the folder `output` has a copy of it there.
    """
    if not isinstance(start, dict):
        return None
    if isinstance(start.get("hf"), str):
        kept = Path(str(output)) / "source"
        return start["hf"] if Path(start["hf"]).is_dir() or not kept.is_dir() else str(kept)
    imported = Path(str(start.get("from"))) / "source"
    return str(imported) if (imported / "config.json").is_file() else None


def _model_of(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """The recipe's `model` with what the Hugging Face model in `folder` has."""
    from megatron_mlmclm.convert import model_values  # brings transformers, which most recipes do not need

    theirs = model_values(folder)
    longest = theirs.pop("seq_length")
    for key, value in theirs.items():
        if key != "init_method_std" and _number_or_same(given.get(key, value)) != value:
            raise UserError(f"start: model.{key} is {value} in {folder}, {given[key]} in the recipe")
    if isinstance(length := given.get("seq_length"), int) and length > longest:
        raise UserError(f"model.seq_length is {length}, the model in {folder} takes at most {longest}")
    return {**theirs, **given}


def find_recipe(path: str | Path) -> Path:
    """The file at `path`, or the preset of that name (such as paper/210m-mlm40-42k) where there is no such file."""
    preset = PRESETS / f"{path}.yaml"
    return preset if not Path(path).exists() and preset.is_file() else Path(path)


def preset_names() -> list[str]:
    """Names of all presets."""
    return sorted(str(file.relative_to(PRESETS).with_suffix("")) for file in PRESETS.rglob("*.yaml"))


def parse_recipe(values: dict[str, Any], source: str) -> Recipe:
    """Validate a nested mapping; `source` names it in messages."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}") from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key, defaults included."""
    return yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = f"; presets: {', '.join(preset_names())}"
        raise UserError(f"{path}: cannot read the recipe ({error.strerror}){known}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" on line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{where}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place; whole numbers index lists. Missing sections are made."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise UserError(f"override {override!r}: write it as key=value, e.g. optimizer.lr=1e-3")
    try:
        value = _number_or_same(yaml.safe_load(text))
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    node: Any = values
    for part in parents:
        node = node[_index(node, part, key)] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise UserError(f"override {override!r}: {part!r} has no keys below it")
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        node[last] = value


def _number_or_same(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text; a user means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _index(node: list, part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise UserError(f"override {key}: {part!r} is not an index below {len(node)}")
    return int(part)


def _first_problem(error: ValidationError) -> str:
    location, problem = _deepest(error)
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_nearest(location)}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f" (it is {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    return f"{key}: {message}{shown}"


def _deepest(error: ValidationError) -> tuple[list[int | str], Any]:
    """The first problem's place and what it is; of a value that may be of several kinds, that of the likeliest kind."""
    problems = [([part for part in each["loc"] if not _is_tag(part)], each) for each in error.errors()]
    first = problems[0][0]
    return max((each for each in problems if each[0][: len(first)] == first), key=lambda each: len(each[0]))


def _is_tag(part: int | str) -> bool:
    """Whether pydantic put it there to say which kind of value it tried: no key of the recipe."""
    return isinstance(part, str) and (part in TAGS or part.startswith(("list[", "literal[")))


def _nearest(location: list[int | str]) -> str:
    """The known key most like the unknown one, in its own section."""
    section: type[BaseModel] = Recipe
    for part in location[:-1]:
        if isinstance(part, str):
            section = _section_below(section, part)
    known = [field.alias or name for name, field in section.model_fields.items()]
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _section_below(section: type[BaseModel], name: str) -> type[BaseModel]:
    """The section that field `name` holds, also inside a list, an option or an annotation."""
    waiting = [section.model_fields[name].annotation]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        waiting.extend(get_args(annotation))
    return section
