"""A source to token shards, by several processes, resuming wherever it was stopped.

    part 0 ──▶ shard 0: train-00000-00000.bin, val-00000-00000.bin, then shard-00000-00000.json
               shard 1 ...                     ends with the document that fills one of the two
    part 1 ──▶ ...

Each file is written atomically and the .json last; it records where the next shard begins, so that
a kill costs each process the one shard that it was writing.  Which text is in which shard does not
depend on how many processes there are or when they were stopped.
"""

from __future__ import annotations

import hashlib
import pickle
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm.auto import tqdm

from minillama import launch
from minillama.data.shards import ShardFile, are_complete
from minillama.data.sources import DocumentStream
from minillama.data.split import Piece, Place, read_blocks, split_block
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import MinillamaError, SourceUnreachableError
from minillama.files import atomic_file, remove_unfinished, write_atomic

_TOKENS_PER_REPORT = 1 << 18

Report = Callable[[int, int], None]
"""Called with how many more tokens and shards are written."""


class Resume(BaseModel):
    """Where a shard begins: after ``n_written`` pieces of the block at ``place`` of its part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: Place = None
    n_written: int = 0


class Shard(BaseModel):
    """The record of a finished shard of a part.

    Attributes:
        tokenizer_sha256: of the tokenizer that made it.
        train, val: its files; one may be without tokens.
        n_documents: that begin in this shard.
        n_blank: documents without text, which were left out.
        next: where the next shard begins; None: this is the last of its part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer_sha256: str
    train: ShardFile
    val: ShardFile
    n_documents: int
    n_blank: int
    next: Resume | None


def _ignore(tokens: int, shards: int) -> None:
    """Report nothing."""


class _Item(NamedTuple):
    piece: Piece | None  # None: a document without text
    is_held_out: bool
    after: Resume


@dataclass(frozen=True)
class ShardWriter:
    """Writes the tokens of a source into ``folder``.

    Attributes:
        stream: the source.
        tokenizer: that encodes it.
        folder: where the files go; it exists.
        shard_tokens: a shard ends with the document that reaches this number.
        val_fraction: share of the text's bytes that is held out.
        split_seed: of the shuffle before the split.
    """

    stream: DocumentStream
    tokenizer: Tokenizer
    folder: Path
    shard_tokens: int
    val_fraction: float
    split_seed: int

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The type of the ids, little-endian on the disk."""
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"

    def write(self, workers: int) -> list[Shard]:
        """Write all shards that are not finished yet and return all, in order.

        Args:
            workers: how many processes to start; below 2: none, this one writes.

        Raises:
            DataError: the source cannot be used.
            SourceUnreachableError: the connection to it was lost; what is finished is kept.
            MinillamaError: a worker was killed; what is finished is kept.
            OSError: the folder cannot be written.
        """
        workers = min(workers, self.stream.n_parts)
        remove_unfinished(self.folder)
        with tqdm(unit=" tokens", unit_scale=True, desc="tokenizing", delay=2) as bar:
            n_shards = 0

            def report(tokens: int, shards: int) -> None:
                nonlocal n_shards
                n_shards += shards
                bar.set_postfix_str(f"{n_shards} shards", refresh=False)
                bar.update(tokens)

            try:
                if workers > 1:
                    _write_in_processes(self, workers, report)
                # Of what workers have written, only the records are read here.
                rest = _ignore if workers > 1 else report
                parts = [self.write_part(part, rest) for part in range(self.stream.n_parts)]
            except SourceUnreachableError as error:
                raise SourceUnreachableError(
                    f"{error}; {n_shards} finished shards are kept in {self.folder}: run the same "
                    "command again to resume"
                ) from error
        return [shard for shards in parts for shard in shards]

    def write_part(self, part: int, report: Report) -> list[Shard]:
        """Write the shards of ``part`` that are not finished yet and return all, in order."""
        shards: list[Shard] = []
        items = None
        begin: Resume | None = Resume()
        while begin is not None:
            name = f"{part:05}-{len(shards):05}"
            shard = self._finished(name)
            if shard is not None:
                items = None  # the stream is behind by now
                report(shard.train.tokens + shard.val.tokens, 1)
            else:
                items = items or self._items(part, begin)
                shard = self._write_shard(name, items, report)
            shards.append(shard)
            begin = shard.next
        return shards

    def split_text(self) -> Iterator[tuple[str, bool]]:
        """Yield all text in order, each with whether it is held out."""
        for part in range(self.stream.n_parts):
            for item in self._items(part, Resume()):
                if item.piece is not None:
                    yield item.piece.text, item.is_held_out

    def _items(self, part: int, begin: Resume) -> Iterator[_Item]:
        skipped = begin.n_written
        for block in read_blocks(self.stream.read(part, begin.place), begin.place):
            train, val = split_block(block.pieces, self.val_fraction, self.split_seed)
            pieces = [*[None] * block.n_blank, *train, *val]
            n_not_held_out = len(pieces) - len(val)
            for number in range(skipped, len(pieces)):
                after = Resume(place=block.place, n_written=number + 1)
                yield _Item(pieces[number], number >= n_not_held_out, after)
            skipped = 0

    def _finished(self, name: str) -> Shard | None:
        try:
            shard = Shard.model_validate_json((self.folder / f"shard-{name}.json").read_bytes())
        except (OSError, ValidationError):
            return None
        is_ours = shard.tokenizer_sha256 == self.tokenizer.sha256
        return shard if is_ours and self._has_files(shard) else None

    def _has_files(self, shard: Shard) -> bool:
        return are_complete(self.folder, (shard.train, shard.val), self.dtype)

    def _write_shard(self, name: str, items: Iterator[_Item], report: Report) -> Shard:
        paths = self.folder / f"train-{name}.bin", self.folder / f"val-{name}.bin"
        following: Resume | None = None
        n_documents = n_blank = n_reported = 0
        with (
            atomic_file(paths[0]) as train_path,
            atomic_file(paths[1]) as val_path,
            train_path.open("wb") as train_file,
            val_path.open("wb") as val_file,
        ):
            train = _TokenFile(train_file, self.tokenizer, self.dtype)
            val = _TokenFile(val_file, self.tokenizer, self.dtype)
            for piece, is_held_out, after in items:
                if piece is None:
                    n_blank += 1
                    continue
                (val if is_held_out else train).add(piece)
                n_documents += piece.begins
                n_tokens = train.n_tokens + val.n_tokens
                if n_tokens - n_reported >= _TOKENS_PER_REPORT:
                    report(n_tokens - n_reported, 0)
                    n_reported = n_tokens
                if max(train.n_tokens, val.n_tokens) >= self.shard_tokens:
                    following = after
                    break
        shard = Shard(
            tokenizer_sha256=self.tokenizer.sha256,
            train=train.entry(paths[0].name),
            val=val.entry(paths[1].name),
            n_documents=n_documents,
            n_blank=n_blank,
            next=following,
        )
        write_atomic(self.folder / f"shard-{name}.json", shard.model_dump_json())
        report(train.n_tokens + val.n_tokens - n_reported, 1)
        return shard


class _TokenFile:
    """Writes ``[bos] tokens [eos]`` of one piece after the other."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer, dtype: str) -> None:
        self._file, self._tokenizer = file, tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._digest = hashlib.sha256()
        self.n_tokens = self._n_bytes = 0

    def add(self, piece: Piece) -> None:
        bos = [self._tokenizer.bos_id] if piece.begins else []
        eos = [self._tokenizer.eos_id] if piece.ends else []
        for ids in (bos, *self._tokenizer.encode_parts(piece.text), eos):
            data = np.array(ids, self._dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self.n_tokens += len(ids)
        self._n_bytes += len(piece.text.encode())

    def entry(self, name: str) -> ShardFile:
        return ShardFile(
            file=name, tokens=self.n_tokens, bytes=self._n_bytes, sha256=self._digest.hexdigest()
        )


# ------------------------------------------------------------------------------------ processes
#
# Plain subprocesses: multiprocessing would import the user's script again, which hangs or fails
# where that script prepares data outside of `if __name__ == "__main__"`.
#
#     stdin   a pickled (ShardWriter, parts); the worker ends when stdin does
#     stdout  pickled messages: ("report", tokens, shards), ("error", exception)
#     files   the shards and their records, which the parent reads in the end

_Messages = queue.SimpleQueue[tuple[Any, ...]]


def _write_in_processes(writer: ShardWriter, workers: int, report: Report) -> None:
    messages: _Messages = queue.SimpleQueue()
    with ExitStack() as stack:
        for worker in range(workers):
            parts = range(worker, writer.stream.n_parts, workers)
            stack.enter_context(_worker(pickle.dumps((writer, parts)), messages))
        running = workers
        while running:
            kind, *content = messages.get()
            if kind == "report":
                report(*content)
            elif kind == "error":
                raise content[0]
            elif content == [0]:
                running -= 1
            else:
                raise MinillamaError(
                    "a process that prepared data was killed, perhaps for lack of memory; "
                    f"finished shards are kept in {writer.folder}: run the same command again "
                    "with fewer data.workers"
                )


@contextmanager
def _worker(job: bytes, messages: _Messages) -> Iterator[None]:
    """Run a process whose messages go to ``messages``, ("ended", exit status) being the last.

    It is killed when the body ends.
    """
    command = launch.module_command("minillama.data.shard_worker")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def exchange() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                process.stdin.write(job)
                process.stdin.flush()
                while True:
                    messages.put(pickle.load(process.stdout))
            process.stdout.close()  # a worker that still writes ends here
            messages.put(("ended", process.wait()))

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()
