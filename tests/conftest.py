import signal
from collections.abc import Iterator

import pytest

# A shell that starts the tests in the background has them, and their processes, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests out of the user's cache, and let them share one: pydocs takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLAMA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
