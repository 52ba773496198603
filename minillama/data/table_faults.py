"""What goes wrong with ``datasets`` and the hub behind it, in words of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors

from minillama.config.run import HubSource
from minillama.errors import DataError, MinillamaError, SourceUnreachableError

_TIMEOUT = 10.0  # seconds until the hub counts as unreachable
_HTTP_PACKAGES = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")


def no_column(where: str, field: str, columns: list[str]) -> DataError:
    """Return the error of a table without the column that holds the text."""
    return DataError(
        f"{where} has no column {field!r} (data.source.text_field); it has: {', '.join(columns)}"
    )


def not_text(where: str, field: str, kind: str) -> DataError:
    """Return the error of a column that holds something else than text."""
    return DataError(
        f"{where}: column {field!r} (data.source.text_field) holds {kind}, not strings"
    )


def text_of(row: Mapping[str, Any], field: str, where: str) -> str | None:
    """Return the text of a row of a stream, whose columns are not known beforehand.

    Raises:
        DataError: the column is missing, or holds no text.
    """
    if field not in row:
        raise no_column(where, field, list(row))
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise not_text(where, field, type(text).__name__)
    return text


@contextlib.contextmanager
def explained(where: str, unreachable: str | None = None) -> Iterator[None]:
    """Turn what ``datasets`` raises into one line of ours; ``unreachable`` is that of no network.

    Raises:
        DataError: ``where`` cannot be read.
        SourceUnreachableError: the network is at fault.
    """
    try:
        yield
    except MinillamaError:
        raise
    except Exception as error:
        causes = list(_chain(error))
        if any(_is_of_network(cause) for cause in causes):
            raise SourceUnreachableError(
                unreachable
                or f"cannot reach {where} on the Hugging Face hub, and it is not in the local "
                "cache; connect to the network, or use data.source.kind=pydocs, which needs none, "
                "or kind=files"
            ) from error
        if "scripts are no longer supported" in str(error):
            raise DataError(
                f"{where} exists only as a script, which datasets does not run; use one that "
                "holds data files"
            ) from error
        reason = " ".join(str(causes[-1]).split()) or "it is empty"
        raise DataError(f"cannot read {where}: {reason[:300]}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_network(error: BaseException) -> bool:
    return (
        isinstance(error, (ConnectionError, TimeoutError, huggingface_hub.errors.HfHubHTTPError))
        or type(error).__module__.partition(".")[0] in _HTTP_PACKAGES
    )


def hub_answers(source: HubSource) -> bool:
    """Ask the hub once, since ``datasets`` itself would try for half a minute."""
    try:
        huggingface_hub.HfApi().dataset_info(
            source.path, revision=source.revision, timeout=_TIMEOUT
        )
    except huggingface_hub.errors.RevisionNotFoundError:
        raise DataError(f"data set {source.path!r} has no revision {source.revision!r}") from None
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise DataError(
            f"the hub has no data set {source.path!r}, or it is private; check data.source.path"
        ) from None
    except huggingface_hub.errors.HFValidationError as error:
        raise DataError(f"data.source.path = {source.path!r}: {error}") from None
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # it answers; whatever it means, load_dataset will say
    except Exception:
        return False  # each version of the hub's client has errors of its own for no network
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Let ``datasets`` look into its own cache only."""
    holders: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ``datasets`` from printing bars, and errors that we word ourselves."""
    bars = datasets.are_progress_bars_disabled()
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()
