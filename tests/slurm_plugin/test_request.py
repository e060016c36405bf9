"""What root on a node lets through: request.c, hostlist.c and view.c, as tables, as laws, and under a fuzzer."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slurm_plugin.building import HERE, PLUGIN, build

Ask = Callable[..., str]
PURE = [PLUGIN / name for name in ("request.c", "hostlist.c", "view.c")]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    program = build(tmp_path_factory.mktemp("request") / "request", *PURE, HERE / "request_table.c")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(*words: object) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(" ".join(str(w.hex() if isinstance(w, bytes) else w) for w in words) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line.endswith("\n"), "the program ended: a sanitizer found something"
            return line[:-1]

        yield ask
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


TEXT = "printable ASCII, also ; = | $ & < > ( ) * ? ~ # % ^ { } [ ] ! @ , . / : + - _"
LONGEST = b"jobcomment " + b"x" * 589

ACCEPTED = [
    (b"drain n2 xid 79 step 4711", "drain|n2|xid 79 step 4711"),
    (b"down n2 no answer", "down|n2|no answer"),
    (b"nodecomment gpu-07.rack_3 torchpass: x", "nodecomment|gpu-07.rack_3|torchpass: x"),
    (b"jobcomment active=4 spares=1/2; 01:22 n2->n5", "jobcomment||active=4 spares=1/2; 01:22 n2->n5"),
    (f"drain n2 {TEXT}".encode(), f"drain|n2|{TEXT}"),
    (b"drain " + b"n" * 63 + b" x", "drain|" + "n" * 63 + "|x"),
    (b"drain n2 trailing space ", "drain|n2|trailing space "),
    (b"jobcomment drain n2 x", "jobcomment||drain n2 x"),
    (LONGEST, "jobcomment||" + "x" * 589),
]

VERB, NODE, WORDS = "no: unknown verb", "no: bad node", "no: bad text"
REFUSED = [
    (b"", VERB),
    (b" ", VERB),
    (b"drain", NODE),
    (b"drain ", NODE),
    (b"drain n2", WORDS),
    (b"drain n2 ", WORDS),
    (b"drain  n2 x", NODE),
    (b" drain n2 x", VERB),
    (b"drain\tn2\tx", VERB),
    (b"DRAIN n2 x", VERB),
    (b"drainn2 x", VERB),
    (b"resume n2 x", VERB),
    (b"undrain n2 x", VERB),
    (b"update nodename=n2 state=down", VERB),
    (b"drain n[1-3] x", NODE),
    (b"drain n1,n2 x", NODE),
    (b"drain ALL= x", NODE),
    (b"drain n2;reboot x", NODE),
    (b"drain $(reboot) x", NODE),
    (b"drain n2/../n3 x", NODE),
    (b"drain n\xc3\xbc x", NODE),
    (b"drain n2\xff x", NODE),
    (b"drain " + b"n" * 64 + b" x", NODE),
    (b"drain n2  x", WORDS),
    (b"drain n2 -x", WORDS),
    (b"drain n2 --help", WORDS),
    (b'drain n2 x" state="resume', WORDS),
    (b"drain n2 it's", WORDS),
    (b"drain n2 `reboot`", WORDS),
    (b"drain n2 a\\nb", WORDS),
    (b"drain n2 a\tb", WORDS),
    (b"drain n2 a\rb", WORDS),
    (b"drain n2 a\x1b[2Jb", WORDS),
    (b"drain n2 a\x7fb", WORDS),
    (b"drain n2 gr\xc3\xbcn", WORDS),
    (b"jobcomment -x", WORDS),
    (b"jobcomment", WORDS),
    (b"drain n2 a\0b", "no: the line has a zero byte"),
    (b"\0drain n2 x", "no: the line has a zero byte"),
    (b"drain n2 x\0", "no: the line has a zero byte"),
    (LONGEST + b"x", "no: the line is too long"),
    (b"drain n2 " + b"x" * 60000, "no: the line is too long"),
    (b"x" * 600, VERB),
]


@pytest.mark.parametrize(("line", "answer"), ACCEPTED, ids=[str(line[:40]) for line, _ in ACCEPTED])
def test_is_understood(ask: Ask, line: bytes, answer: str) -> None:
    assert ask("parse", line) == answer


@pytest.mark.parametrize(("line", "why"), REFUSED, ids=[str(line[:40]) for line, _ in REFUSED])
def test_is_refused_with_a_reason(ask: Ask, line: bytes, why: str) -> None:
    assert ask("parse", line).startswith(why)


@given(st.binary(max_size=700))
@settings(max_examples=300, deadline=None)
def test_any_bytes_get_an_answer_and_only_clean_text_gets_through(ask: Ask, line: bytes) -> None:
    for prefix in (b"", b"drain ", b"drain n2 ", b"jobcomment "):
        answer = ask("parse", prefix + line)
        if not answer.startswith("no: "):
            verb, node, text = answer.split("|", 2)
            assert " ".join([verb, *([node] if node else []), text]).encode() == prefix + line


NODES = "n[1-3],gpu[007-012]-ib,login"
OWNER = "no: the caller is not the job's owner"[4:]
FOREIGN = "the node is not one of the job's nodes"


@pytest.mark.parametrize(
    ("caller", "line", "answer"),
    [
        (2001, b"drain n2 x", "yes"),
        (0, b"drain n2 x", "yes"),
        (2002, b"drain n2 x", OWNER),
        (65534, b"drain n2 x", OWNER),
        (2002, b"jobcomment x", OWNER),
        (2001, b"drain n4 x", FOREIGN),
        (2001, b"down gpu013-ib x", FOREIGN),
        (2001, b"nodecomment n x", FOREIGN),
        (0, b"drain n4 x", FOREIGN),
        (2001, b"nodecomment gpu007-ib x", "yes"),
        (2001, b"jobcomment x", "yes"),
    ],
)
def test_only_the_owner_and_only_for_nodes_of_the_job(ask: Ask, caller: int, line: bytes, answer: str) -> None:
    assert ask("allowed", 2001, NODES, caller, line) == answer


USED_UP = "the job has used up the number of nodes that it may take out"


@pytest.mark.parametrize(
    ("cap", "node", "taken", "answer"),
    [
        (1, "n1", "", "yes"),
        (0, "n1", "", USED_UP),
        (1, "n2", "n1", USED_UP),
        (1, "n1", "n1", "yes"),  # drained before, now set down: still one node
        (2, "n3", "n1 n2", USED_UP),
        (2, "n2", "n1 n2", "yes"),
        (1, "n2", "n1 n2", USED_UP),  # it claimed the node, but somebody else was first
        (3, "n3", "n1 n1 n1", "yes"),
        (128, "n128", " ".join(f"n{i}" for i in range(128)), USED_UP),
        (128, "n127", " ".join(f"n{i}" for i in range(128)), "yes"),
        (4294967295, "x", " ".join(f"n{i}" for i in range(200)), USED_UP),
    ],
)
def test_the_cap_counts_different_nodes(ask: Ask, cap: int, node: str, taken: str, answer: str) -> None:
    assert ask("cap", cap, node, taken) == answer


MEMBERS = [
    ("n1", "n1", True),
    ("n1", "n10", False),
    ("n10", "n1", False),
    ("n[1-3]", "n2", True),
    ("n[1-3]", "n4", False),
    ("n[1-3]", "n0", False),
    ("n[1-3]", "n02", False),
    ("n[1-3]", "n", False),
    ("n[1-3]", "n2x", False),
    ("n[1-3]", "n22", False),
    ("n[1-3,5,9-12]", "n5", True),
    ("n[1-3,5,9-12]", "n10", True),
    ("n[1-3,5,9-12]", "n4", False),
    ("n[08-11]", "n08", True),
    ("n[08-11]", "n8", False),
    ("n[08-11]", "n10", True),
    ("n[098-101]", "n100", True),
    ("n[98-101]", "n100", True),
    ("n[98-101]", "n098", False),
    ("n[001]", "n1", False),
    ("n[0-1]", "n0", True),
    ("a1,b[2-3],c", "b3", True),
    ("a1,b[2-3],c", "c", True),
    ("a1,b[2-3],c", "b", False),
    ("gpu[1-2]-ib", "gpu2-ib", True),
    ("gpu[1-2]-ib", "gpu2", False),
    ("r[1-2]n[01-03]", "r2n03", True),
    ("r[1-2]n[01-03]", "r3n03", False),
    ("n[1-2]0", "n10", True),
    ("n[1-2]0", "n20", True),
    ("n[1-2]0", "n1", False),
    ("n[1-12][0-9]", "n115", True),
    ("n[1", "n1", False),
    ("n[1-", "n1", False),
    ("n[-3]", "n2", False),
    ("n[]", "n", False),
    ("n[a-c]", "nb", False),
    ("n[3-1]", "n2", False),
    ("n]1[", "n1", False),
    (",,n1", "n1", True),
    ("n[1-99999999999999999999]", "n5", False),
    ("n[1-5]", "n" + "1" * 62, False),
    ("n[1-2][1-2][1-2][1-2][1-2]", "n11111", False),
]


@pytest.mark.parametrize(("nodes", "node", "answer"), MEMBERS, ids=[f"{n} in {s}" for s, n, _ in MEMBERS])
def test_a_list_of_nodes(ask: Ask, nodes: str, node: str, answer: bool) -> None:
    assert ask("has", nodes, node) == str(int(answer))


RANGE = st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 3))
ITEM = st.tuples(st.sampled_from(["n", "gpu", "r1-"]), st.lists(RANGE, max_size=3), st.sampled_from(["", "-ib", "0"]))


@given(
    st.lists(ITEM, min_size=1, max_size=3), st.sampled_from(["n", "gpu", "r1-"]), st.integers(0, 300), st.integers(1, 3)
)
@settings(max_examples=300, deadline=None)
def test_a_list_holds_just_what_it_expands_to(
    ask: Ask, items: list[tuple[str, list[tuple[int, int, int]], str]], stem: str, number: int, width: int
) -> None:
    names: set[str] = set()
    written = []
    for prefix, ranges, suffix in items:
        texts = []
        for low, more, digits in ranges:
            texts.append(f"{low:0{digits}}-{low + more:0{digits}}" if more else f"{low:0{digits}}")
            names |= {f"{prefix}{value:0{digits}}{suffix}" for value in range(low, low + more + 1)}
        if not ranges:
            names.add(prefix + suffix)
        written.append(prefix + (f"[{','.join(texts)}]" if ranges else "") + suffix)
    nodes = ",".join(written)
    assert ask("ok", nodes) == "1"
    for name in itertools.islice(names, 20):
        assert ask("has", nodes, name) == "1", (nodes, name)
    for name in (f"{stem}{number:0{width}}", f"{stem}{number:0{width}}-ib", f"{stem}{number}0"):
        assert ask("has", nodes, name) == str(int(name in names)), (nodes, name)


@pytest.mark.parametrize("nodes", ["-n", "n1 n2", "n1;x", "$(x)", "n1\\", "n'1"])
def test_a_list_that_slurm_would_not_write_is_not_handed_on(ask: Ask, nodes: str) -> None:
    assert ask("ok", nodes.split(" ")[0] if nodes.startswith("-") else nodes.replace(" ", "\t")) == "0"


def node(name: str, reason: str = "", comment: str = "", extra: str = "", state: str = "") -> str:
    """As scontrol 22.05 to 26.05 print it."""
    lines = [f"NodeName={name} Arch=x86_64 CoresPerSocket=1 ", "   CPUAlloc=1 CPUTot=8 CPULoad=1.70"]
    lines += [f"   State={state or ('MIXED+DRAIN' if reason else 'MIXED')} ThreadsPerCore=1 Weight=1 Owner=N/A"]
    lines += [f"   Reason={reason} [root@2026-11-30T13:56:20]"] if reason else []
    lines += [f"   Comment={comment}"] if comment else []
    lines += [f"   Extra={extra}"] if extra else []
    return "\n".join([*lines, "", ""])


OURS = "torchpass job 7: xid 79"
NEWS = "torchpass job 7: news"
TAKES = "torchpass job 7 takes n2"


@dataclass
class View:
    """What the helper on n9, which is asked to take n2 out for job 7, makes of what scontrol says."""

    seen: str = "1"
    taken: str = ""
    marked: str = "0"
    reason: str = ""
    comment: str = ""
    new_reason: str = NEWS
    new_extra: str = "no claim"


VIEWS = [
    (node("n1") + node("n2") + node("n3"), View()),
    (node("n1"), View(seen="0")),
    ("", View(seen="0")),
    # what counts as taken out
    (node("n1", OURS) + node("n2"), View(taken="n1")),
    (node("n1", OURS) + node("n2", OURS), View(taken="n1,n2", marked="1", reason=OURS)),
    (node("n2", OURS) + node("n2", OURS), View(taken="n2", marked="1", reason=OURS)),
    (node("n2", OURS, state="DOWN*+DRAIN"), View(taken="n2", marked="1", reason=OURS)),
    (node("n2", OURS, state="IDLE"), View()),  # back in service
    (node("n2", "torchpass: no GPU 3"), View(reason="torchpass: no GPU 3")),
    (node("n2", "torchpass job 71: x"), View(reason="torchpass job 71: x")),
    (node("n1", extra="torchpass job 7 takes n5") + node("n2"), View(taken="n5")),
    (node("n1", OURS, extra="torchpass job 7 takes n1") + node("n2"), View(taken="n1")),
    (node("n1", extra='{"a": "b"} torchpass job 7 takes n5') + node("n2"), View(taken="n5")),
    (node("n1", extra="torchpass job 71 takes n5") + node("n2"), View()),
    (node("n1", extra="torchpass job 7 takes ") + node("n2"), View()),
    (node("n1", extra=f"torchpass job 7 takes {'n' * 64}") + node("n2"), View()),
    # other people's reasons and comments
    (node("n2", "bad DIMM"), View(reason="bad DIMM", new_reason=f"{NEWS}; was: bad DIMM")),
    (node("n2", "bad DIMM", state="IDLE"), View()),
    (
        node("n2", "Not responding", state="DOWN*"),
        View(reason="Not responding", new_reason=f"{NEWS}; was: Not responding"),
    ),
    (
        node("n2", f"{OURS}; was: bad DIMM"),
        View(taken="n2", marked="1", reason=f"{OURS}; was: bad DIMM", new_reason=f"{NEWS}; was: bad DIMM"),
    ),
    (node("n2", "bad [slot 3]"), View(reason="bad [slot 3]", new_reason=f"{NEWS}; was: bad [slot 3]")),
    (node("n2", 'a "b" \\c `d`'), View(reason="a ?b? ?c ?d?", new_reason=f"{NEWS}; was: a ?b? ?c ?d?")),
    (node("n2", "x" * 3000), View(reason="x" * 255, new_reason=f"{NEWS}; was: {'x' * 255}")),
    (node("n2", comment="RMA 4711"), View(comment="RMA 4711")),
    # our own claim
    (node("n2") + node("n9"), View(new_extra=TAKES)),
    (node("n2") + node("n9", extra='{"a": "b"}'), View(new_extra=f'{{"a": "b"}} {TAKES}')),
    (node("n2") + node("n9", extra="torchpass job 7 takes n3"), View(new_extra=TAKES)),
    (node("n2") + node("n9", extra="x torchpass job 5 takes n3"), View(new_extra=f"x {TAKES}")),
    (node("n2") + node("n9", extra="x" * 1000), View(new_extra=f"{'x' * 1000} {TAKES}")),
    (node("n2") + node("n9", extra="x" * 1001), View()),
    # what a user could write into a comment does not become a line of its own
    (node("n1", comment=f"x    Reason={OURS}") + node("n2"), View()),
    (node("n1", comment="torchpass job 7 takes n5") + node("n2"), View()),
    (node("n1", comment="x NodeName=n2") + node("n3"), View(seen="0")),
    (f"Reason={OURS}\n   Reason={OURS}\n" + node("n2"), View()),
    (node("n" * 300, OURS) + node("n2"), View()),
    ("?\n\n   \n   Reason=\n   State=\n   Extra=\n" + node("n2"), View()),
]


@pytest.mark.parametrize(("text", "view"), VIEWS, ids=[str(number) for number in range(len(VIEWS))])
def test_what_slurm_says_about_the_nodes(ask: Ask, text: str, view: View) -> None:
    assert View(*ask("view", 7, "n2", text.encode()).split("|")) == view


# --- the fuzzer ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clang = shutil.which("clang")
    program = tmp_path_factory.mktemp("fuzz") / "fuzz"
    flags = ["-std=c11", "-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", f"-I{PLUGIN}"]
    if clang is None or subprocess.run([clang, *flags, "-o", program, *PURE, HERE / "fuzz_request.c"]).returncode:
        pytest.skip("needs clang with its fuzzer: apt-get install clang libclang-rt-14-dev")
    return program


def fuzz(program: Path, folder: Path, seconds: int) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    seeds = [line for line, _ in ACCEPTED + REFUSED] + [f"{nodes}\n{name}".encode() for nodes, name, _ in MEMBERS]
    seeds += [(node("n1", OURS) + node("n2", "bad DIMM", "RMA")).encode()]
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    words = folder / "words"
    words.write_text(
        "".join(
            f'"{word}"\n'
            for word in ("drain ", "down ", "jobcomment ", "   Reason=", "   Extra=", "NodeName=", OURS, TAKES)
        )
    )
    run = subprocess.run(
        [program, f"-max_total_time={seconds}", "-max_len=4096", f"-dict={words}", "-timeout=5", corpus],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert run.returncode == 0, run.stdout[-4000:]


def test_the_fuzzer_finds_nothing_in_ten_seconds(fuzzer: Path, tmp_path: Path) -> None:
    fuzz(fuzzer, tmp_path, 10)


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_the_fuzzer_finds_nothing_in_ten_minutes(fuzzer: Path, tmp_path: Path) -> None:
    fuzz(fuzzer, tmp_path, 600)
