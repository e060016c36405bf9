from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpwrap.core.faults import parse
from tpwrap.core.job import Job
from tpwrap.core.timeouts import Timeouts


@given(st.floats(0.2, 3600))
def test_what_is_derived_is_consistent(seconds: float) -> None:
    times = Timeouts.derive(seconds)
    assert times.node_silence == seconds
    assert times.heartbeat * 3 < times.node_silence < times.release < times.restore < times.ready


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.1, 1e9, float("nan"), float("inf")])
def test_the_knob_has_a_range(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^failure_timeout: .* give 0.2 to 3600"):
        Timeouts.derive(seconds)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("heartbeat", 5.0, "node_silence"),
        ("release", 9.0, "release"),
        ("ready", 50.0, "ready"),
        ("warm", 1.0, "warm"),
        ("stop_grace", 0.0, "stop_grace"),
        ("tick", float("nan"), "tick"),
    ],
)
def test_limits_that_contradict_each_other_are_named(field: str, value: float, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}: .*give ") as error:
        replace(Timeouts.derive(10), **{field: value})
    assert "\n" not in str(error.value)


def test_job() -> None:
    job = Job(nodes=4, nproc_per_node=2, spares=2, faults=(parse("node=5 phase=recovery:restore kill"),))
    assert (job.world_size, job.total_nodes, job.sidecar_copies) == (8, 6, 2)
    assert Job(nodes=1).sidecar_copies == 0
    assert Job(nodes=2).sidecar_copies == 1
    assert Job(nodes=1, spares=3).sidecar_copies == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "nodes: 0"),
        ({"nodes": 1, "nproc_per_node": 0}, "nproc_per_node: 0"),
        ({"nodes": 1, "spares": -1}, "spares: -1"),
        ({"nodes": 1, "unit": "host"}, "unit: 'host'"),
        ({"nodes": 2, "faults": (parse("rank=2 phase=setup kill"),)}, "inject: .*rank=2 is outside.*rank=1"),
        ({"nodes": 2, "faults": (parse("node=2 phase=setup kill"),)}, "inject: .*node=0 to node=1"),
    ],
)
def test_a_job_that_cannot_be(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**fields)  # type: ignore[arg-type]
