"""A stream to token shards, by several processes, going on wherever it was stopped.

    part 0 ──▶ shard 0: train-00000-00000.bin, val-00000-00000.bin, then shard-00000-00000.json
               shard 1 ...                     ends with the document that fills one of the two
    part 1 ──▶ ...

Each file is written under another name, synced and renamed, and the .json last: it names where the
stream goes on, so that a kill costs each process the one shard it was at.  Which documents are held
out is drawn for each from (split_seed, part, its number), so that nothing is decided by how many
processes there are or when they were stopped.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from minillama.data.shards import ShardFile, ShardIndex
from minillama.data.streams import Pieces, Place, Stream
from minillama.data.token_writer import TokenWriter
from minillama.data.tokenizer import Tokenizer
from minillama.errors import MinillamaError, SourceUnreachableError

_REPORTED_AT_ONCE = 1 << 18  # tokens
_UNFINISHED = ".unfinished"

Report = Callable[[int, int], None]
"""Is told how many tokens and shards there are more."""


class Shard(BaseModel):
    """What is known of a shard of a part once its files are there.

    Attributes:
        made_by: a hash of what decides its content, besides the source.
        train, val: its files; one may be without tokens.
        n_pieces: of the part so far, blank ones left out.
        n_documents: that begin in this shard.
        place: where the stream goes on; nowhere if it is the last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_by: str
    train: ShardFile
    val: ShardFile
    n_pieces: int
    n_documents: int
    is_last: bool
    place: Place


@dataclass(frozen=True)
class Sharding:
    """How a stream becomes shards in ``folder``."""

    stream: Stream
    tokenizer: Tokenizer
    folder: Path
    shard_tokens: int
    val_fraction: float
    split_seed: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the ids, little-endian."""
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<u4")

    @property
    def made_by(self) -> str:
        """A hash of what decides a shard, besides the source and what the folder's name holds."""
        decisive = f"{self.tokenizer.sha256} {self.stream.n_parts} {self.shard_tokens}"
        return hashlib.sha256(decisive.encode()).hexdigest()

    def write(self, workers: int) -> list[Shard]:
        """Write all shards that are not there yet and return all, in order.

        Raises:
            DataError: the source cannot be used.
            SourceUnreachableError: it was lost on the way; what is finished is kept.
            MinillamaError: a worker was killed; what is finished is kept.
            OSError: the folder cannot be written.
        """
        workers = min(workers, self.stream.n_parts)
        for leftover in self.folder.glob(f"*{_UNFINISHED}-*"):
            leftover.unlink(missing_ok=True)
        with tqdm(unit=" tokens", unit_scale=True, desc="tokenizing", delay=2) as bar:
            n_shards = 0

            def report(tokens: int, shards: int) -> None:
                nonlocal n_shards
                n_shards += shards
                bar.set_postfix_str(f"{n_shards} shards", refresh=False)
                bar.update(tokens)

            try:
                if workers > 1:
                    parts = _written_by_processes(self, workers, report)
                else:
                    parts = [self.write_part(part, report) for part in range(self.stream.n_parts)]
            except SourceUnreachableError as error:
                raise SourceUnreachableError(
                    f"{error}; {n_shards} finished shards are kept in {self.folder}: do the same "
                    "again to go on"
                ) from error
        return [shard for shards in parts for shard in shards]

    def write_part(self, part: int, report: Report) -> list[Shard]:
        """Write the shards of ``part`` that are not there yet and return all of it, in order."""
        shards: list[Shard] = []
        pieces = None
        while not shards or not shards[-1].is_last:
            name = f"{part:05}-{len(shards):05}"
            shard = self._finished(name)
            if shard is not None:
                pieces = None  # the stream is behind by now
                report(shard.train.tokens + shard.val.tokens, 1)
            else:
                n_pieces, place = (shards[-1].n_pieces, shards[-1].place) if shards else (0, None)
                pieces = pieces or self.stream.read(part, place)
                shard = self._write_shard(name, part, n_pieces, pieces, report)
            shards.append(shard)
        return shards

    def train_texts(self) -> Iterator[str]:
        """Yield the text that is not held out, in order."""
        for part in range(self.stream.n_parts):
            n_pieces = 0
            for piece, _ in self.stream.read(part):
                if piece.text:
                    if not self._is_held_out(part, n_pieces):
                        yield piece.text
                    n_pieces += 1

    def _is_held_out(self, part: int, number: int) -> bool:
        name = f"{self.split_seed} {part} {number}".encode()
        drawn = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        return drawn < self.val_fraction * 2**64

    def _finished(self, name: str) -> Shard | None:
        try:
            shard = Shard.model_validate_json((self.folder / f"shard-{name}.json").read_bytes())
        except (OSError, ValidationError):
            return None
        is_whole = index_of([shard], self.dtype).is_whole(self.folder)
        return shard if is_whole and shard.made_by == self.made_by else None

    def _write_shard(
        self, name: str, part: int, n_pieces: int, pieces: Pieces, report: Report
    ) -> Shard:
        names = f"train-{name}.bin", f"val-{name}.bin"
        place: Place = None
        is_last, n_documents, reported = True, 0, 0
        with _replacing(self.folder / names[0]) as one, _replacing(self.folder / names[1]) as other:
            train, val = (TokenWriter(file, self.tokenizer, self.dtype) for file in (one, other))
            for piece, place_after in pieces:
                if not piece.text:
                    continue
                (val if self._is_held_out(part, n_pieces) else train).add(piece)
                n_pieces += 1
                n_documents += piece.begins
                written = train.n_tokens + val.n_tokens
                if written - reported >= _REPORTED_AT_ONCE:
                    report(written - reported, 0)
                    reported = written
                if max(train.n_tokens, val.n_tokens) >= self.shard_tokens:
                    is_last, place = False, place_after()
                    break
        files = (
            ShardFile(file=file, tokens=w.n_tokens, bytes=w.n_bytes, sha256=w.digest.hexdigest())
            for file, w in zip(names, (train, val), strict=True)
        )
        shard = Shard(
            made_by=self.made_by,
            train=next(files),
            val=next(files),
            n_pieces=n_pieces,
            n_documents=n_documents,
            is_last=is_last,
            place=place,
        )
        write_whole(self.folder / f"shard-{name}.json", shard.model_dump_json().encode())
        report(train.n_tokens + val.n_tokens - reported, 1)
        return shard


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, on the disk before it has its name."""
    with _replacing(path) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes ``path`` once it is written and on the disk."""
    temporary = path.with_name(f"{path.name}{_UNFINISHED}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------------ processes


def _written_by_processes(sharding: Sharding, workers: int, report: Report) -> list[list[Shard]]:
    context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
    alive, lifeline = context.Pipe(duplex=False)
    reports = context.SimpleQueue()

    def pass_on_reports() -> None:
        while not reports.empty():
            report(*reports.get())

    begun_with = (sharding, reports, alive)
    with (
        closing(reports),
        alive,
        lifeline,
        ProcessPoolExecutor(workers, context, _begin, begun_with) as pool,
    ):
        try:
            futures = [pool.submit(_write_part, part) for part in range(sharding.stream.n_parts)]
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                pass_on_reports()
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise MinillamaError(
                "a process that prepared data was killed, perhaps for want of memory; finished "
                f"shards are kept in {sharding.folder}: do the same again, with fewer data.workers"
            ) from error
        except BaseException:
            lifeline.close()  # without which workers leave at once, as they do if this one dies
            raise


_in_worker: dict[str, Any] = {}
"""What a worker was given at its start."""


def _begin(sharding: Sharding, reports: Any, alive: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    _in_worker.update(sharding=sharding, reports=reports)
    threading.Thread(target=_leave_without, args=(alive,), daemon=True).start()


def _leave_without(alive: Connection) -> None:
    with suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def _write_part(part: int) -> list[Shard]:
    reports = _in_worker["reports"]
    shards: list[Shard] = _in_worker["sharding"].write_part(
        part, lambda tokens, shards: reports.put((tokens, shards))
    )
    return shards


# ---------------------------------------------------------------------------------------- index


def index_of(shards: list[Shard], dtype: np.dtype[Any]) -> ShardIndex:
    """Return the index of all shards, in order; files without tokens are left out."""
    return ShardIndex(
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        train=tuple(shard.train for shard in shards if shard.train.tokens),
        val=tuple(shard.val for shard in shards if shard.val.tokens),
    )
