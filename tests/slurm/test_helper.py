from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tpwrap.slurm.commands import SlurmError, run
from tpwrap.slurm.helper import ask, clean, is_final


def answering(path: Path, answer: bytes) -> list[bytes]:
    """A helper for one request; what it was asked appears in the list."""
    asked: list[bytes] = []
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        connection, _ = server.accept()
        with server, connection:
            asked.append(connection.recv(1000))
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return asked


def test_a_request_and_its_answers(tmp_path: Path) -> None:
    asked = answering(tmp_path / "a", b"ok\n")
    ask(tmp_path / "a", "drain", "n4", "silent step 5")
    assert asked == [b"drain n4 silent step 5\n"]
    answering(tmp_path / "b", b"refused: n9 is no node of this job\n")
    with pytest.raises(SlurmError, match="refused: n9 is no node"):
        ask(tmp_path / "b", "drain", "n9", "x")
    answering(tmp_path / "c", b"")
    with pytest.raises(SlurmError, match="says: nothing"):
        ask(tmp_path / "c", "drain", "n4", "x")
    with pytest.raises(SlurmError, match="does not answer"):
        ask(tmp_path / "none", "drain", "n4", "x")


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        (b"refused: n9 is no node of this job\n", True),
        (b"refused: slurmctld does not answer: try again later\n", False),
        (b"refused: busy: try again later\n", False),
        (b"refused: too many requests\n", False),
        (b"", False),
    ],
)
def test_what_may_be_asked_again(answer: bytes, final: bool, tmp_path: Path) -> None:
    answering(tmp_path / "a", answer)
    with pytest.raises(SlurmError) as refusal:
        ask(tmp_path / "a", "drain", "n4", "x")
    assert is_final(refusal.value) is final
    with pytest.raises(SlurmError) as nobody:
        ask(tmp_path / "none", "drain", "n4", "x")
    assert not is_final(nobody.value)


def test_only_harmless_text_is_sent() -> None:
    assert clean("--a \"b\"\n'c' \\ $d `e` \x07ü=;") == "a b c  d e =;"
    assert len(clean("x" * 1000)) == 400


def test_commands_say_what_went_wrong() -> None:
    assert run(["echo", "hi"]) == "hi\n"
    with pytest.raises(SlurmError, match="no such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(SlurmError, match="No such file"):
        run(["/does/not/exist"])
    with pytest.raises(SlurmError, match="no answer within"):
        run(["sleep", "60"], patience=0.1)
