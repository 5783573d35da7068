"""Documents of parquet and Arrow files, a few rows at a time."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron_mlmclm.data.sources import Source, opened, opened_seekable
from megatron_mlmclm.data.text import BadRecord, Batch, Reading, Slice, excess
from megatron_mlmclm.errors import UserError

if TYPE_CHECKING:
    import pyarrow

ROWS = 256  # a batch of a parquet file: some megabytes of documents as they commonly are
ARROW_FILE = b"ARROW1"  # the form with a footer; `datasets` writes the one without


def count_row_groups(source: Source) -> int:
    """How many row groups a parquet `source` has. Errors: UserError where it is cut or no parquet file."""
    with opened_seekable(source) as file:
        return _parquet(file).num_row_groups


def read_table(part: Slice, reading: Reading, on_bad: BadRecord) -> Iterator[Batch]:
    """As `text.read_slice`, for a parquet or Arrow source. Rows are counted from 1 in messages."""
    row = 1
    for rows, start in _parquet_rows(part, reading) if part.source.form == "parquet" else _arrow_rows(part, reading):
        row = start if start is not None else row
        yield _documents(rows, row, part.source, reading, on_bad)
        row += rows.num_rows


def _parquet(file: BinaryIO) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file)


def _parquet_rows(part: Slice, reading: Reading) -> Iterator[tuple["pyarrow.RecordBatch", int | None]]:
    with opened_seekable(part.source) as file:
        table = _parquet(file)
        _check_columns(table.schema_arrow, part.source, reading.keys)
        end = table.num_row_groups if part.end is None else part.end
        start: int | None = 1 + sum(table.metadata.row_group(group).num_rows for group in range(part.begin))
        wanted = range(part.begin, end)
        for rows in table.iter_batches(ROWS, row_groups=wanted, columns=list(dict.fromkeys(reading.keys))):
            yield rows, start
            start = None


def _arrow_rows(part: Slice, reading: Reading) -> Iterator[tuple["pyarrow.RecordBatch", int | None]]:
    import pyarrow

    with opened(part.source) as file:
        magic = file.read(len(ARROW_FILE))
    footed = magic == ARROW_FILE
    with (opened_seekable if footed else opened)(part.source) as file:
        reader = (pyarrow.ipc.open_file if footed else pyarrow.ipc.open_stream)(file)
        _check_columns(reader.schema, part.source, reading.keys)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if footed else reader
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield batch.slice(start, ROWS), None


def _check_columns(schema: "pyarrow.Schema", source: Source, keys: Sequence[str]) -> None:
    import pyarrow

    for key in keys:
        if key not in schema.names:
            there = ", ".join(map(repr, schema.names[:12])) or "none"
            raise UserError(f"{source.path}: no column {key!r}; its columns are: {there} (choose one with --text-key)")
        kind = schema.field(key).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string, _is_string_view)):
            raise UserError(f"{source.path}: the column {key!r} holds {kind}, not text; choose another with --text-key")


def _is_string_view(kind: "pyarrow.DataType") -> bool:
    import pyarrow

    return pyarrow.types.is_string_view(kind)


def _documents(rows: "pyarrow.RecordBatch", row: int, source: Source, reading: Reading, on_bad: BadRecord) -> Batch:
    try:
        columns = [rows.column(key).to_pylist() for key in reading.keys]
    except UnicodeDecodeError as error:
        raise UserError(f"{source.path}: row {row} or soon after: text that is not UTF-8; write it anew") from error
    texts: list[list[str]] = [[] for _ in columns]
    n_bytes = 0
    for number, record in enumerate(zip(*columns, strict=True), row):
        wrong = next((key for key, text in zip(reading.keys, record, strict=True) if text is None), None)
        if wrong is not None:
            on_bad(UserError(f"{source.path}: row {number}: the value of {wrong!r} is null, not a string"))
            continue
        if sum(map(len, record)) > reading.max_document:
            on_bad(UserError(f"{source.path}: row {number}: {excess(reading)}"))
            continue
        for column, text in zip(texts, record, strict=True):
            column.append(text)
            n_bytes += len(text)
    return Batch(texts, n_bytes)
