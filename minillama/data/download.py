"""Files behind http and https URLs, kept in the cache."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from tqdm import tqdm

from minillama.data.building import build_once
from minillama.errors import DataError, SourceUnreachableError
from minillama.files import cache_folder

_TIMEOUT = 10.0  # seconds without an answer
_READ_AT_ONCE = 1 << 16  # bytes


def download(url: str) -> Path:
    """Return the local copy of ``url``, fetched if the cache does not have it yet.

    Raises:
        DataError: the server says that there is no such file.
        SourceUnreachableError: the server cannot be reached, or stops half-way.
    """
    name = PurePosixPath(urlsplit(url).path).name or "index"
    folder = cache_folder() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    build_once(folder, Path.is_dir, lambda temporary: _fetch(url, temporary / name))
    return folder / name


def _fetch(url: str, path: Path) -> None:
    try:
        response = urllib.request.urlopen(url, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(
            f"{url}: the server answers {error.code} {error.reason}; check the address"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, getattr(error, "reason", error)) from error
    with response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0)) or None
        got = 0
        with tqdm(total=total, unit="B", unit_scale=True, desc=path.name, delay=2) as bar:
            while block := _block(url, response):
                file.write(block)
                got += len(block)
                bar.update(len(block))
        if total and got < total:
            raise _unreachable(url, f"the answer ended after {got} of {total} bytes")


def _block(url: str, response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_READ_AT_ONCE)
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error


def _unreachable(url: str, reason: object) -> SourceUnreachableError:
    return SourceUnreachableError(
        f"cannot fetch {url}: {reason}; connect to the network, or use a local file, or "
        "data.source.kind=pydocs, which needs none"
    )
