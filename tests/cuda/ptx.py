"""Runs the few instructions of PTX that `kvd/cuda/copy.ptx` has, a thread at a time: where there is no GPU."""

import re
from collections.abc import Callable, Iterator, Mapping

_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "min": min,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {"ge": lambda a, b: a >= b}


class Program:
    """The kernel of a text; its memory is `load(address, size)` and `store(address, bytes)`."""

    def __init__(self, text: str) -> None:
        body = text[text.index("{", text.index(".entry")) + 1 : text.rindex("}")]
        self._lines: list[str] = []
        self._labels: dict[str, int] = {}
        for line in re.sub(r"//.*", "", body).replace(":", ":;").split(";"):
            if line := line.strip():
                if line.endswith(":"):
                    self._labels[line[:-1]] = len(self._lines)
                elif not line.startswith(".reg"):
                    self._lines.append(line)

    def run(
        self,
        table: int,
        threads: Mapping[str, int],
        load: Callable[[int, int], bytes],
        store: Callable[[int, bytes], None],
    ) -> None:
        """One thread to its end; `threads` has the special registers."""
        known: dict[str, int] = {"[table]": table, **threads}
        at = 0
        while not (line := self._lines[at]).startswith("ret"):
            at += 1
            guard, line = re.match(r"(?:@(\w+)\s+)?(.*)", line, re.DOTALL).groups()
            if guard and not known[guard]:
                continue
            name, rest = line.split(None, 1)
            operation, *kinds = name.split(".")
            if operation == "bra":
                at = self._labels[rest]
                continue
            operands = list(_operands(rest))
            if operation == "st":
                store(_address(operands[0], known), b"".join(known[word].to_bytes(4, "little") for word in operands[1]))
            elif operation == "ld" and kinds[0] == "global":
                words = operands[0] if isinstance(operands[0], list) else [operands[0]]
                size = int(kinds[-1][1:]) // 8
                found = load(_address(operands[1], known), size * len(words))
                for place, word in enumerate(words):
                    known[word] = int.from_bytes(found[place * size : (place + 1) * size], "little")
            elif operation == "setp":
                known[operands[0]] = _COMPARISONS[kinds[0]](*(_value(word, known) for word in operands[1:]))
            else:
                function = _OPERATIONS["mov" if operation == "ld" else operation]
                known[operands[0]] = function(*(_value(word, known) for word in operands[1:]))


def _operands(text: str) -> Iterator[str | list[str]]:
    for group, word in re.findall(r"\{([^}]*)\}|([^,\s]+)", text):
        yield [each.strip() for each in group.split(",")] if group else word


def _value(word: str, known: Mapping[str, int]) -> int:
    return known[word] if word in known else int(word)


def _address(operand: str, known: Mapping[str, int]) -> int:
    register, _, offset = operand.strip("[]").partition("+")
    return known[register] + int(offset or 0)
