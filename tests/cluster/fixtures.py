"""Beds for pytest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster import Bed, BedUnavailable


@contextmanager
def open_bed(**options: Any) -> Iterator[Bed]:
    """A bed for one test; skips it where none is possible, but with TORCHPASS_REQUIRE_BED=1 that is a failure."""
    bed = Bed(**options)
    try:
        bed.start()
    except BedUnavailable as reason:
        if os.environ.get("TORCHPASS_REQUIRE_BED") == "1":
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))
    try:
        yield bed
    finally:
        bed.stop()


def bed_fixture(scope: Any = "module", **options: Any) -> Callable[..., Any]:
    """A fixture: `bed = bed_fixture(nodes=3)`; its tests share one bed and must leave its nodes as they found them."""

    @pytest.fixture(scope=scope)
    def bed() -> Iterator[Bed]:
        with open_bed(**options) as opened:
            yield opened

    return bed
