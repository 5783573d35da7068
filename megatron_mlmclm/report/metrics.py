"""RUN_DIR/metrics.jsonl: one checked record a line."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, TypeAdapter, ValidationError

from megatron_mlmclm.errors import UserError

METRICS_FILE = "metrics.jsonl"


class TrainRecord(TypedDict):
    """One training step. Loss in nats per predicted token, `time` in Unix seconds, `samples` counted from the start."""

    kind: Literal["train"]
    step: int
    phase: int
    objective: str
    loss: float
    losses: NotRequired[dict[str, float]]  # of a phase with several objectives
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    samples: int
    time: float


class ValidRecord(TypedDict):
    """One validation: by objective, loss in nats per predicted token, share of those tokens that were right."""

    kind: Literal["valid"]
    step: int
    phase: int
    losses: dict[str, float]
    accuracies: NotRequired[dict[str, float]]  # from here on not in the files of older runs
    perplexities: NotRequired[dict[str, float]]
    time: float


_RECORD = TypeAdapter(Annotated[TrainRecord | ValidRecord, Field(discriminator="kind")])


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All records of a run, in the file's order. UserError: missing, empty, without training steps, or a bad line."""
    path = run_dir / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; name the folder that `mlmclm train` wrote") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read it as UTF-8 text ({error})") from error
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not any(record["kind"] == "train" for record in records):
        raise UserError(f"{path}: holds no training step yet; report after the run's first logged step")
    return records


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part not in ("train", "valid"))
        reason = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"{path}, line {number}: {reason}; mend or remove this line") from error


def train_records(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Training steps in order. A step that a resumed run did again counts once, as it was done last."""
    last = {record["step"]: record for record in metrics if record["kind"] == "train"}
    return [last[step] for step in sorted(last)]


def valid_records(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validations in order of their step, the last one of each step."""
    last = {record["step"]: record for record in metrics if record["kind"] == "valid"}
    return [last[step] for step in sorted(last)]
