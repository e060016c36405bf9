"""What is said, and done, when training stands still."""

from __future__ import annotations

from test_membership import Play, emitted, ending, sent

from tpwrap.control import messages as m
from tpwrap.core import events
from tpwrap.core.job import Job
from tpwrap.core.standstill import left_behind, tell
from tpwrap.core.state import Action, End, Stage

WORLD = "0#0/cpu"


def at(
    step: int, number: int, waits: float | None = None, *, group: str = WORLD, everyone: bool = True, line: str = ""
) -> m.Whereabouts:
    """A rank that has joined collectives up to (step, number); waits: so long in the last of them."""
    waiting = [] if waits is None else [m.Waiting(group, "allreduce", step, number - 1, waits, everyone)]
    return m.Whereabouts(0, step, waiting, {group: (step, number)}, line)


def idle(play: Play, seconds: float, *answers: m.Whereabouts | None) -> list[Action]:
    """Nothing moves; whoever is asked gives its answer."""
    collected: list[Action] = []
    while seconds > 0 and play.state.stage is Stage.RUNNING:
        actions = play.wait(0.5)
        seconds -= 0.5
        collected += actions
        if sent(actions, m.Look):
            for rank, answer in enumerate(answers):
                if answer is not None and play.state.stage is Stage.RUNNING:
                    collected += play.say(rank, answer)
    return collected


def notices(actions: list[Action]) -> list[str]:
    return [event.text for event in emitted(actions, events.Notice)]


def ended(actions: list[Action]) -> bool:
    return any(isinstance(action, End) for action in actions)


# --- a rank that has left early ----------------------------------------------------------------------------


def test_whoever_waits_for_a_finished_rank_ends_the_job_with_names_and_fix() -> None:
    play = Play(Job(nodes=3))
    play.say(1, m.Finished(20))
    assert not ended(idle(play, 9, at(21, 1, 9, line="train.py:40"), at(20, 1), at(21, 1, 9)))
    end = ending(idle(play, 4, at(21, 1, 11, line="train.py:40"), at(20, 1), at(21, 1, 11)))
    assert end.exit_code == 1
    for words in (
        "rank 1 has finished",
        "ranks 0, 2 wait in allreduce at step 21 (collective 0 of group 0, train.py:40)",
        "script is at fault",
    ):
        assert words in end.reason


def test_a_rank_that_still_computes_is_waited_for() -> None:
    """Ranks 1 and 2 have done their part of the last gather; rank 0 writes the final checkpoint, or evaluates."""
    play = Play(Job(nodes=3))
    for rank in (1, 2):
        play.say(rank, m.Finished(20))
    assert not ended(idle(play, 500, at(20, 3), at(20, 3), at(20, 3)))


def test_a_collective_that_the_finished_rank_took_part_in_is_waited_for() -> None:
    """Rank 0 gathers from rank 2, which is slow; rank 1 has sent its part and left."""
    play = Play(Job(nodes=3))
    play.say(1, m.Finished(20))
    assert not ended(idle(play, 500, at(20, 3, 400), at(20, 3), at(20, 2)))


def test_a_finished_rank_that_is_no_member_is_not_to_blame() -> None:
    finished, other = at(20, 1), at(20, 1, 99, group="pair#0/cpu", everyone=False)
    assert left_behind([0], {0: finished, 1: other}, 10) is None
    # But a group of all ranks that it never made.
    found = left_behind([0], {0: finished, 1: at(20, 1, 99, group="late#0/cpu")}, 10)
    assert found is not None
    assert (found.finished, found.waiting) == ([0], [1])


def test_a_receive_is_no_proof() -> None:
    waiting = m.Whereabouts(0, 20, [m.Waiting(WORLD, "recv", 20, -1, 99, True)], {WORLD: (20, 1)}, "")
    assert left_behind([0], {0: at(20, 1), 1: waiting}, 10) is None


def test_a_step_is_older_than_any_number_of_a_later_one() -> None:
    assert left_behind([0], {0: at(20, 9), 1: at(21, 1, 99)}, 10) is not None
    assert left_behind([0], {0: at(21, 1), 1: at(20, 9, 99)}, 10) is None


# --- everything else ---------------------------------------------------------------------------------------


def test_a_deadlock_is_told_at_growing_intervals_and_kills_nothing() -> None:
    play = Play(Job(nodes=3))
    waits = at(20, 1, 99, line="train.py:40")
    actions = idle(play, 300, waits, at(20, 0, line="train.py:31"), waits)
    assert not ended(actions)
    assert len(notices(actions)) == 4  # after about 10, 30, 90 and 270 s
    assert notices(actions)[0].startswith("no progress for 10 s: ")
    assert (
        "ranks 0, 2 wait in allreduce at step 20 (collective 0 of group 0, train.py:40); "
        "rank 1 is at train.py:31 and waits in no collective" in notices(actions)[0]
    )


def test_a_rank_that_does_not_answer_is_named() -> None:
    play = Play(Job(nodes=2))
    texts = notices(idle(play, 25, at(20, 1, 99), None))
    assert "rank 1 does not answer" in texts[0]


def test_nothing_is_said_while_collectives_go_on() -> None:
    """An evaluation that makes no steps, but sums up."""
    play = Play(Job(nodes=2))
    for number in range(100):
        assert not notices(idle(play, 5, at(20, number, 1), at(20, number)))


def test_a_long_step_has_its_time() -> None:
    play = Play(Job(nodes=2))
    play.wait(40)
    play.say(0, m.Progress(21))
    assert not notices(idle(play, 115, at(21, 1, 99), at(21, 0)))
    assert notices(idle(play, 15, at(21, 1, 99), at(21, 0)))


def test_in_the_middle_of_an_ordinary_step_nobody_is_asked() -> None:
    play = Play(Job(nodes=2))
    play.wait(40)
    for step in (21, 22, 23):
        play.say(0, m.Progress(step))
        assert not sent(play.wait(39), m.Look)
    assert sent(play.wait(2), m.Look)


def test_one_long_step_does_not_hide_for_as_long_that_a_rank_has_left() -> None:
    play = Play(Job(nodes=2))
    play.wait(3000)
    play.say(0, m.Progress(21))
    play.say(1, m.Finished(21))
    assert ended(idle(play, 125, at(22, 1, 99), at(21, 1)))


def test_before_the_first_step_there_is_more_patience_and_without_a_session_no_word_unless_somebody_waits() -> None:
    play = Play(Job(nodes=2), start=False)
    for node in range(2):
        play.join(node)
        play.warm(node)
    assert not notices(idle(play, 200, at(-1, 0), at(-1, 0)))
    play = Play(Job(nodes=2), start=False)
    for node in range(2):
        play.join(node)
        play.warm(node)
    assert not notices(idle(play, 55, at(-1, 1, 50), at(-1, 0)))
    assert "rank 0 waits in allreduce during set-up" in notices(idle(play, 15, at(-1, 1, 50), at(-1, 0)))[0]


def test_steps_start_the_patience_anew() -> None:
    play = Play(Job(nodes=2))
    for step in range(21, 60):
        assert not notices(idle(play, 8, at(step, 1, 99), at(step, 0)))
        play.say(0, m.Progress(step))


def test_answers_of_an_older_generation_are_not_heard() -> None:
    play = Play(Job(nodes=2))
    play.say(1, m.Finished(20))
    play.wait(11)
    play.warm(0)
    play.die(0)
    play.heal(20)
    play.wait(5.5)
    for rank, answer in ((0, at(21, 1, 99)), (1, at(20, 1))):
        assert not ended(play.say(rank, answer))


def test_the_state_of_each_rank_is_told() -> None:
    told = tell(range(5), [3], {0: at(-1, 1, 5), 1: at(4, 1), 2: at(4, 1, line="a.py:1"), 3: at(4, 1)})
    assert told == (
        "rank 0 waits in allreduce during set-up (collective 0 of group 0); "
        "rank 1 is elsewhere and waits in no collective; "
        "rank 2 is at a.py:1 and waits in no collective; rank 3 has finished its script; rank 4 does not answer"
    )
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 others do not answer" in tell(range(100), [], {})
