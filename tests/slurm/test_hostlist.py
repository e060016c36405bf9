from __future__ import annotations

import pytest

from tpwrap.slurm.hostlist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,5],gpu07", ["n1", "n2", "n5", "gpu07"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[a-b]", "n[[1]]", "n[1-999999999]", "n[1-99999][1-99999]"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="n"):
        expand(text)
