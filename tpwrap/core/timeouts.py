"""Every time limit of a job, derived from one knob and checked against each other.

Someone who tunes detection turns `failure_timeout` alone. The other limits follow, because they only work
in a certain order: a node must be given up before its workers are blamed for not answering, and a newcomer
before the survivors that wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Lower limits for what depends on the user's script and the machine, not on how fast a failure is noticed.
_SLOWEST_WARM_UP = 120.0
_SLOWEST_RESTORE = 60.0
_SLOWEST_JOIN = 60.0


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Build it with `derive`; building it directly checks the order just the same."""

    failure_timeout: float
    """the knob: how long silence may last before it counts as death"""
    heartbeat: float
    """period of heartbeats between supervisor and coordinator, both ways"""
    tick: float
    """how often the coordinator looks at its deadlines"""
    node_silence: float
    """a supervisor silent for longer is lost, and its node with it"""
    hung: float
    """a worker that is stopped for longer is killed by its supervisor"""
    comm_error_grace: float
    """after a failed collective: how long to wait for the news who died before healing without a death"""
    handshake: float
    """a connection that has not proved it holds the job's key by then is closed"""
    release: float
    """a survivor must have drained its communicators"""
    restore: float
    """a newcomer must have run the script's set-up and restored its state (set-up time comes on top)"""
    ready: float
    """a survivor must have rebuilt its communicators; it waits for the newcomers meanwhile"""
    warm: float
    """a new worker must have become warm"""
    first_update: float
    """ranks that have come to their first update wait for the others, to know whether the job votes"""
    join: float
    """at start: every supervisor must have connected"""
    stop_grace: float
    """between asking a process to end and killing it"""

    def __post_init__(self) -> None:
        check(self)

    @staticmethod
    def derive(failure_timeout: float = 10.0) -> Timeouts:
        """All limits from the one knob."""
        if not 0.2 <= failure_timeout <= 3600.0:
            raise ValueError(
                f"failure_timeout: {failure_timeout:g} s is out of range; "
                "give 0.2 to 3600 seconds (default 10)"
            )
        unit = failure_timeout
        restore = max(_SLOWEST_RESTORE, 6 * unit)
        return Timeouts(
            failure_timeout=unit,
            heartbeat=unit / 10,
            tick=min(unit / 20, 0.1),
            node_silence=unit,
            hung=unit,
            comm_error_grace=unit / 10,
            handshake=unit,
            release=1.5 * unit,
            restore=restore,
            ready=1.2 * restore + 2 * unit,
            warm=max(_SLOWEST_WARM_UP, 12 * unit),
            first_update=6 * unit,
            join=max(_SLOWEST_JOIN, 6 * unit),
            stop_grace=unit / 2,
        )


def check(times: Timeouts) -> None:
    """Raise ValueError, in one line with the field and the fix, where two limits contradict each other."""
    for name in times.__dataclass_fields__:
        value = getattr(times, name)
        if not value > 0:
            raise ValueError(f"{name}: {value:g} s is not a time limit; give a number above 0")
    # (smaller, factor, larger, why)
    rules = (
        ("tick", 1, "heartbeat", "deadlines are looked at more often than heartbeats come"),
        ("heartbeat", 3, "node_silence", "two heartbeats may be lost before a node counts as dead"),
        ("comm_error_grace", 1, "release", "a failed collective is judged before survivors are"),
        ("node_silence", 1.2, "release", "a silent node is given up before its workers are blamed"),
        ("hung", 1.2, "release", "a stopped worker is found by its supervisor first"),
        ("release", 1, "restore", "restoring takes longer than letting go"),
        ("restore", 1.1, "ready", "a newcomer is given up before the survivors that wait for it"),
        ("release", 1, "warm", "a worker needs longer to start than to let go"),
    )
    for smaller, factor, larger, why in rules:
        low, high = getattr(times, smaller), getattr(times, larger)
        if low * factor > high * (1 + 1e-9):
            raise ValueError(
                f"{larger}: {high:g} s is too short beside {smaller} = {low:g} s ({why}); "
                f"give at least {low * factor:g} s, or set failure_timeout alone and let the rest follow"
            )
