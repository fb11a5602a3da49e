"""Parser of SASS listings of nvdisasm or cuobjdump: the instructions of a kernel, and its loops."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

GROUPS = {
    "tensor": r"[HQI]GMMA|[HID]MMA|UTC\w*MMA",
    "load": r"LD(?!GDEPBAR)\w*|UTMALDG|UBLKCP",
    "store": r"ST\w*|UTMASTG|RED|ATOM\w*",
    "convert": r"[FI]2[FI]P?|FRND",
    "exp2": r"MUFU",
    "barrier": r"BAR|SYNCS|\w*DEPBAR|WARP\w+|MEMBAR|FENCE|\w*ERRBAR|BSSY|BSYNC|NANOSLEEP|ELECT|VOTEU?|UTMACMDFLUSH",
    "uniform": r"U[A-Z]\w*|[RS]2UR",
    "integer": r"[IV][A-Z]\w*|P?LOP3|SH[FLR]|SHFL|LEA|PRMT|SEL|MOVM?|FLO|POPC|BREV|BMSK|SGXT|[RSP]2[RP]|CS2R|REDUX",
    "float": r"[FHD][A-Z]\w*",
    "other": r"\w*",
}
"""Pattern of the opcodes of each instruction group. An opcode belongs to the first group that matches."""

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;/\n]*)")
JUMP = re.compile(r"BRA|BRXU?|JMP|JMXU?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `@predicate opcode operands`."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def head(self) -> str:
        """Opcode without modifiers: HGMMA for HGMMA.64x128x16.F32.BF16."""
        return self.opcode.partition(".")[0]

    @property
    def group(self) -> str:
        return next(group for group, pattern in GROUPS.items() if re.fullmatch(pattern, self.head))

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a wgmma instruction, 64 * 128 * 16 for HGMMA.64x128x16.F32.BF16; 0 for other
        instructions.
        """
        shape = re.match(r"[HQI]GMMA\.(\d+)x(\d+)x(\d+)", self.opcode)
        return math.prod(map(int, shape.groups())) if shape else 0

    @property
    def operand_bits(self) -> int:
        """Bits of an operand element of a wgmma instruction."""
        return 8 if self.head in ("QGMMA", "IGMMA") else 32 if "TF32" in self.opcode else 16

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that each thread reads or writes in an LDS, STS, LDSM or STSM instruction; 0 for
        others.
        """
        if self.head in ("LDSM", "STSM"):
            return 4 * int(self.opcode[-1]) if self.opcode[-2:] in (".2", ".4") else 4
        if self.head in ("LDS", "STS"):
            width = re.search(r"\.(64|128)\b", self.opcode)
            return int(width[1]) // 8 if width else 4
        return 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Instructions of a kernel. `successors[n]` has the indices of the instructions that may follow instruction n."""

    instructions: Sequence[Instruction]
    successors: Sequence[frozenset[int]]


def parse(listing: str) -> Kernel:
    """Parse the listing of one kernel.

    Raises:
      ValueError: the listing has no instruction, or a jump has no target in the listing.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := LINE.search(line):
            address, predicate, opcode, operands = found.groups(default="")
            instructions.append(Instruction(int(address, 16), predicate, opcode, operands.strip()))
    if not instructions:
        raise ValueError("expected a listing of machine instructions, found none")
    places = {f"{i.address:#x}": n for n, i in enumerate(instructions)} | labels
    successors = [frozenset(_successors(instructions, places, n)) for n in range(len(instructions))]
    return Kernel(instructions, successors)


def _successors(instructions: Sequence[Instruction], places: dict[str, int], n: int) -> Iterator[int]:
    instruction = instructions[n]
    jumps = JUMP.fullmatch(instruction.head) is not None
    if jumps:
        targets = re.findall(r"\.L_x_\d+", instruction.operands) or re.findall(r"0x[0-9a-f]+", instruction.operands)
        if not any(target in places for target in targets):
            raise ValueError(f"{instruction.opcode} {instruction.operands}: its target is not in the listing")
        yield from (places[target] for target in targets if target in places)
    conditional = instruction.predicate or (instruction.head == "BRA" and "," in instruction.operands)
    ends = jumps or instruction.head in ("EXIT", "RET", "KILL")
    if (conditional or not ends) and n + 1 < len(instructions):
        yield n + 1


def loops(kernel: Kernel) -> list[frozenset[int]]:
    """Return the natural loops as sets of instruction indices. A natural loop is a header and all instructions that can
    reach a jump back to the header without passing through the header.
    """
    dominators = _dominators(kernel)
    bodies: dict[int, set[int]] = {}
    predecessors: list[list[int]] = [[] for _ in kernel.instructions]
    for n in dominators:
        for successor in kernel.successors[n]:
            predecessors[successor].append(n)
    for n in dominators:
        for header in kernel.successors[n]:
            if dominators[n] >> header & 1:
                body = bodies.setdefault(header, {header})
                waiting = [n]
                while waiting:
                    if (inside := waiting.pop()) not in body:
                        body.add(inside)
                        waiting += predecessors[inside]
    return [frozenset(body) for body in bodies.values()]


def _dominators(kernel: Kernel) -> dict[int, int]:
    """Return the dominators of each reachable instruction: the instructions on every path from the start to it. They
    are a bit set, with bit n for instruction n.
    """
    dominators = {0: 1}
    waiting = [0]
    while waiting:
        n = waiting.pop()
        for successor in kernel.successors[n]:
            known = dominators.get(successor)
            through = dominators[n] if known is None else dominators[n] & known
            through |= 1 << successor
            if through != known:
                dominators[successor] = through
                waiting.append(successor)
    return dominators


def main_loops(kernel: Kernel) -> list[list[Instruction]]:
    """Return the innermost loops that have a tensor-core instruction, each without the instructions of loops inside
    it.
    """
    found = loops(kernel)
    innermost = set()
    for n, instruction in enumerate(kernel.instructions):
        around = [body for body in found if n in body]
        if instruction.group == "tensor" and around:
            innermost.add(min(around, key=len))
    passes = [body.difference(*(other for other in found if other < body)) for body in innermost]
    return [[kernel.instructions[n] for n in sorted(body)] for body in sorted(passes, key=min)]
