"""Which names of a frame in the middle of a call may still be read.

Classic backward data-flow over the bytecode, for Python 3.10 to 3.13; on a later interpreter, and for anything that is
not understood, every name is live. Three kinds of names are live together with what the data-flow finds:

* variables in cells (a closure may read them at any time), and globals that a function of the module reads;
* all of them, where the code asks for its own namespace (`locals()`, `exec`, …);
* names whose value waits on the value stack: in `total = total + work()` the tensor behind `total` is still needed
  while `work` runs, and so is the list that a `for` loop goes through. Arguments of the running call do not count: they
  are the callee's.
"""

from __future__ import annotations

import dis
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType

_KNOWN_PYTHON = (3, 10) <= sys.version_info[:2] <= (3, 13)

_READS = {"LOAD_FAST", "LOAD_FAST_CHECK"}
_WRITES = {"STORE_FAST", "DELETE_FAST"}
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": (True, True),
    "STORE_FAST_LOAD_FAST": (False, True),
    "STORE_FAST_STORE_FAST": (False, False),
}
"""super-instructions: whether each half is a read"""
_GLOBAL_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_GLOBAL_WRITES = {"STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}

_OWN_NAMESPACE = {"locals", "vars", "dir", "exec", "eval"}
_MODULE_NAMESPACE = {"globals", "vars", "exec", "eval"}

_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_ALWAYS_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
_ONLY_POPS = ("POP_", "STORE_", "DELETE_", "JUMP_", "END_FOR", "END_ASYNC_FOR", "GEN_START", "IMPORT_STAR")
_ADDS_TO_DEEPER = {"LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"}
_ROTATES = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}
_SETUPS = {"SETUP_FINALLY": 0, "SETUP_WITH": 0, "SETUP_ASYNC_WITH": -1}
"""Python 3.10: instructions that open a block, and its stack level relative to the depth before them"""
_EXCEPTION_ITEMS_310 = 6


class _Unclear(Exception):
    """The code is not understood: all its names count as live."""


def live_names(frame: FrameType) -> frozenset[str]:
    """Names of `frame`, which is in a call (or suspended), that may be read after it and before they are set anew.

    Local variables, cells included, of a function; global names of a module (builtins may be among them); all names of
    a class body. The names need not be bound.
    """
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _cache.get(key)
    if known is None:
        known = _cache[key] = (code, _live(code, frame))
    names = known[1]
    return frozenset(frame.f_locals) if names is None else names


_cache: dict[tuple[int, int], tuple[CodeType, frozenset[str] | None]] = {}
"""by identity, because hashing a code object costs more than the walk it saves; the code is held, so ids stay true"""


def _live(code: CodeType, frame: FrameType) -> frozenset[str] | None:
    """None: every name in the frame's namespace."""
    if not code.co_flags & CO_OPTIMIZED and frame.f_locals is not frame.f_globals:
        return None
    flow = _flow_of(code)
    if flow is None:
        return frozenset(_fast_names(code)) if code.co_flags & CO_OPTIMIZED else None
    return flow.always | frozenset(name for bit, name in enumerate(flow.names) if flow.at(frame.f_lasti) >> bit & 1)


@dataclass(frozen=True)
class _Flow:
    """Live names of a code object as bit masks over `names`."""

    names: list[str]
    offsets: list[int]
    during: list[int]
    """by instruction: live while it runs"""
    start: int
    always: frozenset[str]

    def at(self, lasti: int) -> int:
        # An interpreter may point into the inline caches behind the call.
        return self.start if lasti < 0 else self.during[bisect_right(self.offsets, lasti) - 1]


_flows: dict[int, tuple[CodeType, _Flow | None]] = {}


def _flow_of(code: CodeType) -> _Flow | None:
    known = _flows.get(id(code))
    if known is None:
        try:
            known = (code, _analyse(code))
        except _Unclear:
            known = (code, None)
        _flows[id(code)] = known
    return known[1]


def _fast_names(code: CodeType) -> list[str]:
    return list(dict.fromkeys(code.co_varnames + code.co_cellvars + code.co_freevars))


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _read_by_functions(module: CodeType) -> frozenset[str]:
    """Global names that the code nested in `module` reads. Raises _Unclear where it may read any."""
    names = set()
    for code in _nested(module):
        for instruction in dis.get_instructions(code):
            if instruction.opname in _GLOBAL_READS:
                names.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME" and instruction.argval == "__main__":
                raise _Unclear
    if names & _MODULE_NAMESPACE:
        raise _Unclear
    return frozenset(names)


def _analyse(code: CodeType) -> _Flow:
    """Raises _Unclear where the code asks for its namespace, or is not understood."""
    if not _KNOWN_PYTHON:
        raise _Unclear
    is_function = bool(code.co_flags & CO_OPTIMIZED)
    instructions = list(dis.get_instructions(code))
    for instruction in instructions:
        name = instruction.argval
        if instruction.opname in _GLOBAL_READS and (
            name in _OWN_NAMESPACE or (not is_function and name in _MODULE_NAMESPACE)
        ):
            raise _Unclear
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in ("locals", "f_locals"):
            raise _Unclear
    names = _fast_names(code) if is_function else list(code.co_names)
    bits = {name: 1 << bit for bit, name in enumerate(names)}
    always = frozenset(code.co_cellvars + code.co_freevars) if is_function else _read_by_functions(code)

    accesses = [_accesses(instruction, code, bits, is_function) for instruction in instructions]
    graph = _Graph(code, instructions)
    waiting = graph.waiting([pushed for _, _, pushed in accesses])
    reads = [read for read, _, _ in accesses]
    before = _backward(graph, reads, [written for _, written, _ in accesses])
    during = []
    for index, read in enumerate(reads):
        mask = read | waiting[index]
        for successor in graph.successors[index] + graph.handlers[index]:
            mask |= before[successor]
        during.append(mask)
    return _Flow(names, [instruction.offset for instruction in instructions], during, before[0], always)


def _accesses(
    instruction: dis.Instruction, code: CodeType, bits: dict[str, int], is_function: bool
) -> tuple[int, int, list[int] | None]:
    """(names read before anything is written, names written, values pushed by a pure load or else None)."""
    opname, name = instruction.opname, instruction.argval  # a module's fast locals belong to inlined comprehensions
    if opname in _PAIRS:
        assert instruction.arg is not None
        fast = _fast_names(code)
        read = written = 0
        pushed = []
        for is_read, slot in zip(_PAIRS[opname], (instruction.arg >> 4, instruction.arg & 15), strict=True):
            bit = bits[fast[slot]] if is_function else 0
            if is_read:
                read |= bit & ~written
                pushed.append(bit)
            else:
                written |= bit
        return read, written, pushed
    if instruction.opcode in dis.haslocal:
        bit = bits[name] if is_function else 0
        if opname in _READS:
            return bit, 0, [bit]
        if opname in _WRITES:
            return 0, bit, None
        if opname == "LOAD_FAST_AND_CLEAR":
            return bit, bit, [bit]
        if opname == "LOAD_CLOSURE":
            return 0, 0, [bit]
        raise _Unclear
    if opname in _GLOBAL_READS:
        if not is_function:
            return bits.get(name, 0), 0, [bits.get(name, 0)]
        # super() without arguments reads the function's first variable.
        first = bits[code.co_varnames[0]] if name == "super" and code.co_varnames else 0
        return first, 0, [0]
    if opname in _GLOBAL_WRITES and not is_function:
        return 0, bits.get(name, 0), None
    return 0, 0, None


def _backward(graph: _Graph, reads: list[int], writes: list[int]) -> list[int]:
    """Live before each instruction."""
    before = [0] * len(reads)
    changed = True
    while changed:
        changed = False
        for index in range(len(reads) - 1, -1, -1):
            mask = 0
            for successor in graph.successors[index]:
                mask |= before[successor]
            mask = reads[index] | (mask & ~writes[index])
            for handler in graph.handlers[index]:  # the exception may come before the write
                mask |= before[handler]
            if mask != before[index]:
                before[index] = mask
                changed = True
    return before


_Slots = tuple[int, ...]
"""the value stack: by slot, the names whose values may be part of what lies there"""
_Blocks = tuple["tuple[int, int] | None", ...]
"""Python 3.10: open blocks as (handler, stack level); None is a handler that runs"""


class _Graph:
    """Control flow of a code object, found together with what lies on its value stack."""

    def __init__(self, code: CodeType, instructions: list[dis.Instruction]) -> None:
        self.instructions = instructions
        self.index = {instruction.offset: index for index, instruction in enumerate(instructions)}
        self.protected: list[tuple[int, int] | None] = [None] * len(instructions)
        """by instruction, from Python 3.11 on: (handler, stack level)"""
        for start, end, target, depth, with_lasti in _exception_table(getattr(code, "co_exceptiontable", b"")):
            for index, instruction in enumerate(instructions):
                if start <= instruction.offset < end:
                    # `lasti` lies below the exception; as a pure number it may as well count to the level.
                    self.protected[index] = (self.index[target], depth + with_lasti)
        self.successors: list[list[int]] = [self._successors(index) for index in range(len(instructions))]
        self.handlers: list[list[int]] = [[] if entry is None else [entry[0]] for entry in self.protected]

    def _target(self, index: int) -> int | None:
        instruction = self.instructions[index]
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        return self.index[instruction.argval] if jumps else None

    def _successors(self, index: int) -> list[int]:
        opname = self.instructions[index].opname
        if opname in _ENDS:
            return []
        found = []
        if opname not in _ALWAYS_JUMPS and index + 1 < len(self.instructions):
            found.append(index + 1)
        target = self._target(index)
        if target is not None and opname not in _SETUPS:
            found.append(target)
        return found

    def waiting(self, pushes: list[list[int] | None]) -> list[int]:
        """By instruction: names whose values lie on the stack while it runs, and are not its own arguments.

        Completes `handlers` on Python 3.10. Raises _Unclear where the stack's depth is not unique.
        """
        states: dict[int, tuple[_Slots, _Blocks]] = {0: ((), ())}
        waiting = [0] * len(pushes)
        todo = [0]
        while todo:
            index = todo.pop()
            slots, blocks = states[index]
            after = self._after(index, blocks, len(slots))
            handler = self.protected[index] or next((block for block in reversed(blocks) if block), None)
            target = self._target(index)
            flows = [
                (successor, self._moved(index, slots, pushes[index], successor == target), after)
                for successor in self.successors[index]
            ]
            if handler is not None:
                entry, level = handler
                if sys.version_info < (3, 11):
                    while blocks[-1] != handler:
                        blocks = blocks[:-1]
                    items, blocks = _EXCEPTION_ITEMS_310, (*blocks[:-1], None)
                    if entry not in self.handlers[index]:
                        self.handlers[index].append(entry)
                else:
                    items = 1
                flows.append((entry, (slots + (0,) * level)[:level] + (0,) * items, blocks))
            ordinary = flows[: len(self.successors[index])]
            waiting[index] |= self._kept(index, slots, [state for _, state, _ in ordinary])
            for successor, arriving, open_blocks in flows:
                known = states.get(successor)
                if known is None:
                    states[successor] = (arriving, open_blocks)
                elif len(known[0]) != len(arriving) or known[1] != open_blocks:
                    raise _Unclear
                else:
                    merged = tuple(a | b for a, b in zip(known[0], arriving, strict=True))
                    if merged == known[0]:
                        continue
                    states[successor] = (merged, open_blocks)
                todo.append(successor)
        return waiting

    def _after(self, index: int, blocks: _Blocks, depth: int) -> _Blocks:
        opname = self.instructions[index].opname
        if sys.version_info >= (3, 11):
            return blocks
        if opname in _SETUPS:
            handler = self._target(index)
            assert handler is not None
            return (*blocks, (handler, depth + _SETUPS[opname]))
        return blocks[:-1] if opname in ("POP_BLOCK", "POP_EXCEPT") else blocks

    def _depth_after(self, index: int, depth: int, jump: bool) -> int:
        instruction = self.instructions[index]
        try:
            effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=jump)
        except ValueError:
            raise _Unclear from None
        return max(0, depth + effect)  # a generator's first POP_TOP is for a value that is not counted

    def _moved(self, index: int, slots: _Slots, pushed: list[int] | None, jump: bool) -> _Slots:
        """The stack after the instruction."""
        instruction = self.instructions[index]
        opname, arg = instruction.opname, instruction.arg or 0
        depth, after = len(slots), self._depth_after(index, len(slots), jump)
        if pushed is not None:
            if opname in _PAIRS:
                return (*slots[: after - len(pushed)], *pushed)
            return slots + tuple(pushed) * (after - depth)
        if opname in _ADDS_TO_DEEPER:
            kept = list(slots[:after])
            for popped in slots[after:]:
                kept[after - arg] |= popped
            return tuple(kept)
        if opname.startswith(_ONLY_POPS) or (opname == "FOR_ITER" and after < depth):
            return slots[:after] + (0,) * (after - depth)
        if opname == "YIELD_VALUE":
            return (*slots[: after - 1], 0)
        if opname == "SWAP":
            swapped = list(slots)
            swapped[-1], swapped[-arg] = swapped[-arg], swapped[-1]
            return tuple(swapped)
        if opname == "COPY":
            return (*slots, slots[-arg])
        if opname in _ROTATES or opname == "ROT_N":
            floor = depth - _ROTATES.get(opname, arg)
        elif opname == "DUP_TOP_TWO":
            floor = depth - 2
        else:
            floor = min(depth, after) - 1
        floor = max(floor, 0)
        return slots[:floor] + (_union(slots[floor:]),) * (after - floor)

    def _kept(self, index: int, slots: _Slots, after: list[_Slots]) -> int:
        """Names whose values lie under what the instruction takes from the stack."""
        opname = self.instructions[index].opname
        if opname.startswith("CALL") or opname == "YIELD_VALUE":
            return _union(slots[: max(0, self._depth_after(index, len(slots), False) - 1)])
        return _union(tuple(_union(state) for state in after))


def _union(masks: _Slots) -> int:
    united = 0
    for mask in masks:
        united |= mask
    return united


def _exception_table(table: bytes) -> Iterator[tuple[int, int, int, int, bool]]:
    """(start, end, target, depth, whether lasti is pushed) of each entry, in byte offsets; Python 3.11 and later."""
    place = 0

    def number() -> int:
        nonlocal place
        value = table[place] & 63
        while table[place] & 64:
            place += 1
            value = value << 6 | table[place] & 63
        place += 1
        return value

    while place < len(table):
        start, length, target, depth_and_lasti = number() * 2, number() * 2, number() * 2, number()
        yield start, start + length, target, depth_and_lasti >> 1, bool(depth_and_lasti & 1)
