"""The ``minillama`` command and ``python -m minillama``."""

import os
import signal


def run(*command: str) -> None:
    """Run ``command``, if any, with the arguments of the process, and exit with its status."""
    # For a Ctrl-C while the command line is imported: there is nothing to clean up yet.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from minillama.cli import entry_point

    entry_point(*command)


if __name__ == "__main__":
    run()
