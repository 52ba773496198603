"""A process that writes some parts of a source: ``python -m minillama.data.shard_worker``.

See :mod:`minillama.data.shard_writer`, which starts it, for its messages.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

from minillama.data.shard_writer import ShardWriter
from minillama.errors import MinillamaError


def main() -> None:
    """Write the parts that stdin names, and end early if the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints

    def answer(*message: object) -> None:
        pickle.dump(message, answers)
        answers.flush()

    writer: ShardWriter
    writer, parts = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        for part in parts:
            writer.write_part(part, lambda *written: answer("report", *written))
    except (MinillamaError, OSError) as error:
        answer("error", error)


def _exit_with_parent() -> None:
    while os.read(0, 1):  # sys.stdin would hold its lock when this process ends by itself
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
