"""Which files hold the text: paths, folders, globs, @lists, stdin and remote URLs -> sources, each with its form.

.jsonl: one JSON object a line. .txt: one document a line. .parquet, .arrow: one document a row. Each may be compressed
(.gz, .zst, .bz2, .xz). A folder that `datasets.Dataset.save_to_disk` wrote is read in the order of its files.
"""

import bz2
import contextlib
import functools
import glob
import gzip
import io
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from megatron_mlmclm.errors import UserError

FORMS = ("jsonl", "txt", "parquet", "arrow")
PACKED = ("gz", "zst", "bz2", "xz")
STDIN = "-"
KINDS = "a .jsonl, .txt, .parquet or .arrow file (plain or .gz, .zst, .bz2, .xz)"


class Source(NamedTuple):
    """One file of text."""

    path: str  # or a URL, or "-"
    form: str  # of FORMS
    packed: str  # of PACKED, "" where it is plain
    size: int  # bytes as stored; -1 where unknown
    stamp: str  # changes when the content does: time of writing, or what the remote store says

    @property
    def seekable(self) -> bool:
        """Whether a worker can begin in its midst."""
        return not self.packed and self.path != STDIN and self.size >= 0

    @property
    def is_remote(self) -> bool:
        """Whether fsspec reads it."""
        return "://" in self.path


def find_sources(inputs: Iterable[str | Path], form: str | None = None) -> list[Source]:
    """The sources that `inputs` name, in order; folders and globs are sorted. `form` is said of all, else by suffix.

    Errors: UserError for a missing file, a folder or glob without text, an unknown suffix, a file named twice.
    """
    found: dict[str, Source] = {}
    for given in _listed(map(str, inputs)):
        for source in _expand(given, form):
            key = source.path if source.is_remote or source.path == STDIN else str(Path(source.path).resolve())
            if key in found:
                raise UserError(
                    f"{source.path}: named twice by the inputs; name it once (to repeat a source, weight it in a blend)"
                )
            found[key] = source
    if not found:
        raise UserError("no input: name files, folders or globs; - is standard input")
    return list(found.values())


def _listed(inputs: Iterable[str]) -> Iterator[str]:
    """`inputs` with each @FILE replaced by its lines."""
    for given in inputs:
        if not given.startswith("@"):
            yield given
            continue
        try:
            lines = Path(given[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{given[1:]}: cannot read this list of inputs: {error}") from error
        yield from filter(None, map(str.strip, lines))


def _expand(given: str, form: str | None) -> Iterator[Source]:
    if given == STDIN:
        yield Source(STDIN, form or "jsonl", "", -1, "")
    elif "://" in given:
        yield from _expand_remote(given, form)
    else:
        for path in _local_paths(given, form):
            stat = path.stat()
            yield Source(str(path), *_forms(str(path), form), stat.st_size, str(stat.st_mtime_ns))


def _local_paths(given: str, form: str | None) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        return _saved_dataset(path) or _texts(path.rglob("*"), f"{given}: a folder without {KINDS}", form)
    if path.is_file():
        return [path]
    matches = glob.glob(given, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    what = f"matches no {KINDS.removeprefix('a ')}" if glob.has_magic(given) else "no such file or folder"
    return _texts(map(Path, matches), f"{given}: {what}", form)


def _texts(paths: Iterable[Path], message: str, form: str | None) -> list[Path]:
    files = sorted(path for path in paths if path.is_file() and (form or _form_of(path.name)[0]))
    if not files:
        raise UserError(message)
    return files


def _saved_dataset(folder: Path) -> list[Path]:
    """The files of a folder that `datasets` saved, in its order; [] for another folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_object(folder / "dataset_dict.json").get("splits", [])
        named = ", ".join(str(folder / split) for split in splits)
        raise UserError(f"{folder}: holds several splits; name those to read: {named}")
    if not (folder / "state.json").is_file():
        return []
    return [folder / part["filename"] for part in _json_object(folder / "state.json").get("_data_files", [])]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error


def _forms(path: str, form: str | None) -> tuple[str, str]:
    by_suffix, packed = _form_of(path)
    if not (form or by_suffix):
        raise UserError(f"{path}: is not {KINDS}; convert or rename it, or say what it is with --format")
    return form or by_suffix, packed


def _form_of(path: str) -> tuple[str, str]:
    """Form ("" if unknown) and compression ("" if none), by suffix."""
    *_, before, last = ["", *path.rsplit("/", 1)[-1].split(".")]
    packed = last if last in PACKED else ""
    form = before if packed else last
    return form if form in FORMS else "", packed


def _expand_remote(given: str, form: str | None) -> Iterator[Source]:
    with reading(given):
        system, path = _file_system(given)
        if glob.has_magic(path) and "?" not in given:  # a question mark begins the query of a web address
            paths = sorted(system.glob(path))
        else:
            paths = sorted(system.find(path)) if system.isdir(path) else [path]
        many = len(paths) != 1 or paths[0] != path
        if many:
            paths = [found for found in paths if form or _form_of(found)[0]]
        infos = [system.info(found) for found in paths]
    if not paths:
        raise UserError(f"{given}: matches no {KINDS.removeprefix('a ')}")
    for found, info in zip(paths, infos, strict=True):
        stamp = next(
            (str(info[key]) for key in ("ETag", "etag", "mtime", "LastModified", "updated") if key in info), ""
        )
        size = info.get("size")
        name = system.unstrip_protocol(found) if many else given
        yield Source(name, *_forms(name.split("?")[0], form), -1 if size is None else size, stamp)


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what readers raise of missing, forbidden, cut or damaged files into one line that names `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file or folder") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: cut or damaged ({error}); fetch or compress it again") from error
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from error
    except Exception as error:  # a library's own error, which is no OSError; ours pass
        if type(error).__module__.split(".")[0] in ("zlib", "pyarrow", "aiohttp", "botocore", "google"):
            raise UserError(f"{path}: cannot read: {error}") from error
        raise


@contextlib.contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The bytes of `source`, decompressed. What goes wrong in the body too ends in one line (see `reading`)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(reading(source.path))
        file = stack.enter_context(_opened_raw(source))
        if source.packed:
            file = stack.enter_context(_UNPACK[source.packed](file))
        yield file


@contextlib.contextmanager
def opened_seekable(source: Source) -> Iterator[BinaryIO]:
    """As `opened`; a compressed or streamed source is written out to a temporary file first."""
    with opened(source) as file:
        if source.seekable:
            yield file
            return
        with tempfile.TemporaryFile() as whole:
            while block := file.read(1 << 20):
                whole.write(block)
            whole.seek(0)
            yield whole


def _opened_raw(source: Source) -> contextlib.AbstractContextManager[Any]:
    if source.path == STDIN:
        return contextlib.nullcontext(sys.stdin.buffer)
    if source.is_remote:
        system, path = _file_system(source.path)
        return system.open(path, "rb")
    return Path(source.path).open("rb")


def _unpack_zst(file: BinaryIO) -> BinaryIO:
    import pyarrow

    # Unlike the zstandard package's reader this one says when a file is cut.
    return io.BufferedReader(_Raw(pyarrow.CompressedInputStream(file, "zstd")), 1 << 20)


class _Raw(io.RawIOBase):
    """A pyarrow stream as Python's buffered reader wants it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self.stream.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


_UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    "gz": functools.partial(gzip.open, mode="rb"),
    "bz2": bz2.open,
    "xz": lzma.open,
    "zst": _unpack_zst,
}
