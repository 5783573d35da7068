"""Write aside, then rename: a reader sees the whole of a file or folder, or nothing of it."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_mlmclm.errors import UserError


def temp_name(path: Path) -> Path:
    """A fresh name in `path`'s own folder (a rename must not cross file systems). The folder is made if missing."""
    with os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


def commit(temp: Path, path: Path) -> None:
    """Put `temp` (a file or a folder) on disk for good and give it its name `path`."""
    for part in [*temp.rglob("*")] if temp.is_dir() else [temp]:
        _sync(part)
    temp.rename(path)
    _sync(path.parent)


def discard(temp: Path) -> None:
    """Remove `temp`, a file or a folder, if it is there."""
    if temp.is_dir():
        shutil.rmtree(temp, ignore_errors=True)
    else:
        temp.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all. UserError where the system refuses."""
    temp = temp_name(path)
    try:
        with os_errors(path):
            temp.write_bytes(content)
            commit(temp, path)
    finally:
        discard(temp)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it becomes `path` when the body succeeds. UserError if `path` holds files."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists already; name another --output or remove it")
    temp = temp_name(path)
    try:
        with os_errors(path):
            temp.mkdir()
            yield temp
            commit(temp, path)
    finally:
        discard(temp)


@contextlib.contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the body (disk full, no permission) into one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
