"""A user's mistake ends in one clear line and exit status 2, never in a traceback."""

import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Bad input: the message names the file, line or key, and what to do about it. One line."""


def run_cleanly(main: Callable[[], int | None], silent: bool = False) -> None:
    """Run `main` and leave the process: 0 or its status, 2 with one line on stderr for a `UserError`.

    `silent` drops that line: of many ranks that find the same mistake one says it.
    """
    try:
        status = main() or 0
    except UserError as error:
        if not silent:
            print(f"mlmclm: error: {' '.join(str(error).split())}", file=sys.stderr)
        status = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("mlmclm: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
