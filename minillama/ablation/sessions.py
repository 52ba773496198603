"""How long an ablation took, sitting by sitting: sessions.json in its folder.

The file is written anew at each cell's end, so that of a sitting that was killed only the time
after the last such end is lost.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from minillama.errors import RunFolderError
from minillama.files import explain_write_errors, write_atomic

_FILE = "sessions.json"


@dataclass(frozen=True)
class Session:
    """One sitting of an ablation.

    ``preparing_seconds`` went by before the first cell was taken up, ``seconds`` from then on.
    """

    seconds: float
    preparing_seconds: float
    workers: int
    threads: int


def read_sessions(folder: Path) -> tuple[Session, ...]:
    """Return an ablation's sittings, none if they were not recorded.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return ()
    try:
        return tuple(Session(**entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} is damaged: {error}; delete it: the report then says less of the time"
        ) from None


class RunningSession:
    """The sitting that goes on; a context that records it beside those before."""

    def __init__(self, folder: Path, workers: int, threads: int, preparing_seconds: float) -> None:
        self._folder, self._before = folder, read_sessions(folder)
        self._began = time.perf_counter()
        self._known = (preparing_seconds, workers, threads)

    def __enter__(self) -> RunningSession:
        self.save()
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()

    def save(self) -> None:
        """Record it up to now.

        Raises:
            RunFolderError: the file cannot be written.
        """
        session = Session(time.perf_counter() - self._began, *self._known)
        entries = [asdict(each) for each in (*self._before, session)]
        with explain_write_errors(self._folder):
            write_atomic(self._folder / _FILE, json.dumps(entries, indent=2) + "\n")
