"""What the tests of the executor share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
