"""The command `forge-station`, and `python -m forge_station`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Ctrl-C in the second that the libraries take to load: ended by the signal, no traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as with nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forge_station import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
