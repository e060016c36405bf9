from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpwrap.slurm.comment import LIMIT, render, users_own


def test_the_users_own_comment_stays_in_front() -> None:
    text = render("exp 12", "ranks=4", ["a", "b"])
    assert text == "exp 12 | torchpass: ranks=4; a; b"
    assert users_own(text) == "exp 12"
    assert users_own(render("", "ranks=4", [])) == ""
    assert users_own("only mine") == "only mine"


def test_the_oldest_entries_go_first() -> None:
    text = render("own", "sum", [f"entry {i} " + "x" * 60 for i in range(100)])
    assert len(text) <= LIMIT
    assert "entry 99" in text
    assert "entry 0 " not in text
    assert text.startswith("own | torchpass: sum; (")
    assert text.index("entry 98") < text.index("entry 99")


def test_a_comment_that_leaves_no_room() -> None:
    own = "x" * 1020
    assert render(own, "sum", ["entry"]) == own


@given(st.text(max_size=1024), st.text(max_size=50), st.lists(st.text(max_size=200), max_size=30))
def test_never_longer_than_slurm_takes(own: str, summary: str, entries: list[str]) -> None:
    assert len(render(own, summary, entries).encode(errors="replace")) <= LIMIT
