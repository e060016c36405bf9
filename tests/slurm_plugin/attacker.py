"""What a user can do to a helper's socket, run as that user on a node: attacker.py HOW SOCKET [...]; prints JSON.

Plain Python without the project, because it stands for anybody's program.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable


def connect(path: str, patience: float = 30) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)  # blocking: with a time limit, Python would not wait for a place in a full queue
    line.settimeout(patience)
    return line


def send(line: socket.socket, data: bytes) -> bool:
    try:
        line.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False  # it has made up its mind already; what it says can still be read
    return True


def hear(line: socket.socket) -> str:
    answer = b""
    try:
        while chunk := line.recv(1000):
            answer += chunk
    except ConnectionResetError:
        pass
    except TimeoutError:
        return "no answer"
    return answer.decode()


def ask(path: str, data: bytes) -> str:
    with connect(path) as line:
        send(line, data)
        return hear(line)


def ask_all(path: str, lines: list[str]) -> list[str]:
    return [ask(path, bytes.fromhex(data)) for data in lines]


def timed(path: str, data: str) -> tuple[str, float]:
    start = time.monotonic()
    answer = ask(path, data.encode() + b"\n")
    return answer, time.monotonic() - start


def half_closed(path: str, data: str) -> str:
    with connect(path) as line:
        send(line, data.encode())
        line.shutdown(socket.SHUT_WR)
        return hear(line)


def gone(path: str, data: str) -> None:
    """Sends, and is dead before the answer."""
    connect(path).sendall(data.encode())
    os._exit(0)


def byte_by_byte(path: str, data: str) -> str:
    with connect(path) as line:
        for byte in data.encode() + b"\n":
            send(line, bytes([byte]))
            time.sleep(0.002)
        return hear(line)


def silent(path: str) -> tuple[str, float]:
    start = time.monotonic()
    with connect(path) as line:
        return hear(line), time.monotonic() - start


def stall(path: str) -> str:
    with connect(path) as line:
        send(line, b"drain n2 x")
        return hear(line)


def drip(path: str) -> str:
    """Never stops to send, and never comes to an end."""
    with connect(path) as line:
        while send(line, b"x"):
            time.sleep(0.1)
        return hear(line)


def flood(path: str, kind: str, count: int, threads: int) -> dict[str, int]:
    """Connections, `threads` at a time, at least `count` of them and until stdin ends; counts the answers."""
    behaviour: dict[str, Callable[[int], str]] = {
        "garbage": lambda i: ask(path, os.urandom(100 + i % 700)),
        "foreign": lambda i: ask(path, b"drain n%d flood\n" % (100 + i)),
        "comments": lambda i: ask(path, b"jobcomment flood %d\n" % i),
        "stall": lambda i: stall(path),
        "drip": lambda i: drip(path),
    }
    answers: dict[str, int] = {}
    lock = threading.Lock()
    numbers = itertools.count()
    ended = threading.Event()

    def run() -> None:
        while True:
            with lock:
                i = next(numbers)
            if i >= count and ended.is_set():
                return
            try:
                answer = behaviour[kind](i)
            except OSError as error:
                answer = type(error).__name__
            with lock:
                answers[answer.strip()] = answers.get(answer.strip(), 0) + 1

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    print("started", flush=True)
    sys.stdin.read()
    ended.set()
    for worker in workers:
        worker.join()
    return answers


def main() -> object:
    how, path, *rest = sys.argv[1:]
    if how == "ask":
        return ask_all(path, json.load(sys.stdin))
    if how == "flood":
        return flood(path, rest[0], int(rest[1]), int(rest[2]))
    return {"timed": timed, "half": half_closed, "gone": gone, "slow": byte_by_byte, "silent": silent}[how](path, *rest)


if __name__ == "__main__":
    try:
        print(json.dumps(main()))
    except OSError as error:
        print(json.dumps(type(error).__name__))
