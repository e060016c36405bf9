from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpwrap.core.faults import ACTIONS, NODE_ACTIONS, PHASES, STAGES, Fault, parse, parse_file

GOOD = {
    "rank=1 step=20 phase=backward kill": Fault("rank", 1, 20, "backward", None, None, "kill"),
    "node=1 step=20 phase=backward kill": Fault("node", 1, 20, "backward", None, None, "kill"),
    "rank=0 step=first phase=between stop": Fault("rank", 0, 0, "between", None, None, "stop"),
    "drop phase=collective:3 step=5 rank=2": Fault("rank", 2, 5, "collective", 3, None, "drop"),
    "rank=3 phase=setup exception": Fault("rank", 3, None, "setup", None, None, "exception"),
    "rank=3 step=first phase=setup exit": Fault("rank", 3, None, "setup", None, None, "exit"),
    "node=2 phase=recovery:restore kill": Fault("node", 2, None, "recovery", None, "restore", "kill"),
    "rank=2 step=7 phase=recovery:resume kill": Fault("rank", 2, 7, "recovery", None, "resume", "kill"),
    "rank=2 step=7 phase=commit action=kill": Fault("rank", 2, 7, "commit", None, None, "kill"),
}

BAD = {
    "": "action is missing",
    "rank=1 step=2 phase=backward": "action is missing; allowed: kill, exception, stop, exit, drop",
    "step=2 phase=backward kill": "rank or node is missing",
    "rank=1 node=1 step=2 phase=backward kill": "rank and node are both given",
    "rank=x step=2 phase=backward kill": "rank 'x' is not a number",
    "rank=-1 step=2 phase=backward kill": "rank '-1' is not a number",
    "rank=1 step=soon phase=backward kill": "step 'soon' is not a number; allowed: first, 0",
    "rank=1 phase=backward kill": "step is missing (phase=backward needs one)",
    "rank=1 step=3 phase=setup kill": "step 3 comes after set-up",
    "rank=1 step=2 kill": "phase is missing",
    "rank=1 step=2 phase=backwards kill": "phase 'backwards' is unknown; allowed: setup, between",
    "rank=1 step=2 phase=collective kill": "phase '' is not a number; allowed: collective:N",
    "rank=1 step=2 phase=forward:1 kill": "takes nothing after the colon",
    "rank=1 phase=recovery kill": "names no stage; allowed: recovery:release",
    "rank=1 step=2 phase=backward explode": "action 'explode' is unknown; allowed: kill",
    "rank=1 step=2 phase=backward kill stop": "action is given twice",
    "rank=1 rank=2 step=2 phase=backward kill": "rank is given twice",
    "host=1 step=2 phase=backward kill": "host is not a field; allowed: rank, node",
    "node=1 step=2 phase=backward exception": "'exception' cannot happen to a node; allowed: kill, stop",
    "rank=1 step=2 phase=backward drop": "'drop' needs a collective, not phase=backward",
}


@pytest.mark.parametrize("text", GOOD)
def test_good(text: str) -> None:
    assert parse(text) == GOOD[text]
    assert parse(str(GOOD[text])) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_bad(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: ") as error:
        parse(text)
    assert BAD[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_file() -> None:
    text = "# two\n\nrank=1 step=20 phase=backward kill  # the first\n  node=0 step=3 phase=commit stop\n"
    assert [str(fault) for fault in parse_file(text)] == [
        "rank=1 step=20 phase=backward kill",
        "node=0 step=3 phase=commit stop",
    ]
    with pytest.raises(ValueError, match=r"^line 2: 'rank=1': "):
        parse_file("\nrank=1\n")


@st.composite
def all_faults(draw: st.DrawFn) -> Fault:
    target = draw(st.sampled_from(("rank", "node")))
    phase = draw(st.sampled_from(PHASES))
    actions = [a for a in (ACTIONS if target == "rank" else NODE_ACTIONS) if a != "drop" or phase == "collective"]
    steps = st.integers(0, 10**9)
    return Fault(
        target,  # type: ignore[arg-type]
        draw(st.integers(0, 10**6)),
        None if phase == "setup" else draw(st.none() | steps if phase == "recovery" else steps),
        phase,
        draw(st.integers(0, 999)) if phase == "collective" else None,
        draw(st.sampled_from(STAGES)) if phase == "recovery" else None,
        draw(st.sampled_from(actions)),
    )


@given(all_faults())
def test_every_fault_is_written_as_it_is_read(fault: Fault) -> None:
    assert parse(str(fault)) == fault


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse(text)
    except ValueError as error:
        assert "allowed" in str(error)  # noqa: PT017
