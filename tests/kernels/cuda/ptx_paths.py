"""What a kernel does before it has waited for the one before it, from its PTX: by paths, and by the pointers that addresses come from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from numba_meta.kernels.cuda.kernel import CudaKernel, Ptr

WAIT = "griddepcontrol.wait"
CONSTANT = re.compile(r"w\d?|(\w+_)?weight|n_rows|__cudart_\w+")  # pointers to what no kernel of a step writes; tables of sines
_REGISTER = re.compile(r"%(?!p\d)[a-z]+\d+")  # predicates apart: an address does not come from what chooses it


@dataclass(frozen=True)
class Access:
    """An instruction that reads or writes global memory, and the names of the pointers that its address may come from."""

    text: str
    pointers: frozenset[str]
    is_early: bool  # there is a path to it on which nothing was waited for

    @property
    def is_constant_load(self) -> bool:
        """Whether it only reads what no kernel of a step writes."""
        return self.text.startswith("ld.") and bool(self.pointers) and all(CONSTANT.fullmatch(name) for name in self.pointers)


def _instructions(ptx: str) -> list[str]:
    """Labels (`name:`) and instructions of the kernel, in order; scopes of inline code are left out."""
    body = ptx[ptx.index("{", ptx.index(".visible .entry")) + 1 :]
    body = re.sub(r"//[^\n]*", "", body[: body.index("\n}")])  # functions that it calls come behind
    found = []
    for line in body.split("\n"):
        label = re.fullmatch(r"\s*(\$\w+):\s*", line)
        found += [f"{label[1]}:"] if label else [part.strip() for part in line.split(";")]
    scoped = (re.sub(r"^\{(?=\s*\.reg)|^\}$", "", each).strip() for each in found)
    return [each for each in scoped if each and not each.startswith(".")]


def _parts(instruction: str) -> tuple[str, str]:
    """(opcode, operands) without the guard."""
    opcode, _, operands = re.sub(r"^@!?%p\d+\s+", "", instruction).partition(" ")
    opcode, tab, more = opcode.partition("\t")
    return opcode, (more + " " if tab else "") + operands.strip()


def _early(instructions: list[str]) -> set[int]:
    """The instructions that a path from the beginning reaches without waiting. Fails on a branch that is not understood."""
    labels = {each[:-1]: i for i, each in enumerate(instructions) if each.endswith(":")}
    seen: set[int] = set()
    pending = [0]
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        assert at < len(instructions), "the end without `ret`"
        seen.add(at)
        instruction = instructions[at]
        opcode, operands = _parts(instruction)
        assert not opcode.startswith(("brx", "call")), instruction
        if opcode == WAIT:
            assert not instruction.startswith("@"), "waits on some paths alone"
            continue
        if opcode.startswith("bra"):
            pending.append(labels[operands.strip()])
        if not opcode.startswith(("bra", "ret", "exit")) or instruction.startswith("@"):
            pending.append(at + 1)
    return seen


def _sources(instructions: list[str], kernel: CudaKernel) -> dict[str, set[str]]:
    """The pointers among a kernel's parameters that each register may have been computed from; what is loaded comes from none."""
    names = [name if kind is Ptr else "" for name, kind in kernel.parameters.items()]
    found: dict[str, set[str]] = {}
    steps: list[tuple[list[str], list[str]]] = []
    for instruction in instructions:
        opcode, operands = _parts(instruction)
        if opcode.startswith("ld.param"):
            index = re.search(r"_param_(\d+)\]", operands)
            if index:  # else what a function returned
                found.setdefault(re.findall(_REGISTER, operands)[0], set()).update({names[int(index[1])]} - {""})
        elif not opcode.startswith(("ld.", "st.", "bra", "setp")) and operands:
            target = re.match(r"\{[^}]*\}|[^,]*", operands)
            assert target is not None
            targets = re.findall(_REGISTER, target[0])
            steps.append((targets, re.findall(_REGISTER, operands[target.end() :])))
            for each in targets:
                found.setdefault(each, set()).update(re.findall(r"__cudart_\w+", operands))
    changed = True
    while changed:
        changed = False
        for targets, sources in steps:
            pointers = set().union(*(found.get(source, set()) for source in sources))
            for target in targets:
                if not pointers <= found.setdefault(target, set()):
                    found[target] |= pointers
                    changed = True
    return found


def accesses(kernel: CudaKernel, ptx: str) -> list[Access]:
    """Every access to global memory, and every `ret` that is reached without waiting."""
    instructions = _instructions(ptx)
    early, sources = _early(instructions), _sources(instructions, kernel)
    found = []
    for i, instruction in enumerate(instructions):
        opcode, operands = _parts(instruction)
        is_memory = opcode.startswith(("ld", "st", "red", "atom", "cp.async")) and not re.match(
            r"ldmatrix|(ld|st)\.(volatile\.)?(shared|local|param)|cp\.async\.(wait|commit)", opcode
        )
        if is_memory:
            addresses = re.findall(r"\[([^\]]*)\]", operands)
            registers = re.findall(_REGISTER, addresses[-1 if opcode.startswith("cp.async") else 0])
            pointers = frozenset[str]().union(*(sources.get(register, set()) for register in registers))
            found.append(Access(f"{opcode} {operands}", pointers, i in early))
        elif opcode in ("ret", "exit") and i in early:
            found.append(Access(opcode, frozenset(), True))
    return found
