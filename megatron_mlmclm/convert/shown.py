"""A progress bar for conversions."""

import contextlib
import re
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_mlmclm.errors import UserError


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function to be told how many bytes of `total` are done. Shown on a terminal alone, and then removed."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": 1024**2, "GI": 1024**3}


def bytes_in(size: str) -> int:
    """`500MB`, `5GB` or `4GiB` in bytes. UserError: no such size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", size.strip().upper())
    if not found or float(found.group(1)) == 0:
        raise UserError(f"{size!r} is no size; write it as 500MB or 5GB")
    return int(float(found.group(1)) * UNITS[found.group(2) or ""])
