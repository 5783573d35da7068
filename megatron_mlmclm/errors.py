"""A user's mistake ends in one clear line and exit status 2, never in a traceback."""

import sys
import time
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Bad input: the message names the file, line or key, and what to do about it. One line."""


def run_cleanly(main: Callable[[], int | None], patience: float = 0.0) -> None:
    """Run `main` and leave the process: 0 or its status, 2 with one line on stderr for a `UserError`.

    Of many ranks that find the same mistake one should say it: the others have `patience`, in seconds, in which their
    launcher ends them. A mistake that only they find is said after that.
    """
    try:
        status = main() or 0
    except UserError as error:
        time.sleep(patience)
        print(f"mlmclm: error: {' '.join(str(error).split())}", file=sys.stderr)
        status = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("mlmclm: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
