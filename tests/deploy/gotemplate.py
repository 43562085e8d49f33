"""Renders the Helm templates of this repository where there is no `helm`: the part of the template language they use.

Known are `.Values.x.y`, `.Release.Name`, `$variable`, `if`, `not`, `eq`, `range` over lists and maps, `define`,
`include`, `quote`, and `nindent`; whatever else a template says raises. Whitespace is trimmed as Go does at `{{-` and
`-}}`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(r"(\s*\{\{-|\{\{)\s*(.*?)\s*(-\}\}\s*|\}\})", re.DOTALL)
_RANGE = re.compile(r"range (?:\$(\w+), \$(\w+) := )?(\S+)")


class Renderer:
    """`values` and `release` are what the templates see; `load` takes files with definitions in."""

    def __init__(self, values: Mapping[str, Any], release: str) -> None:
        self._root = {"Values": values, "Release": {"Name": release}}
        self._defined: dict[str, list[Any]] = {}

    def load(self, text: str) -> None:
        """Takes the definitions of a file in."""
        self.render(text)

    def render(self, text: str) -> str:
        """The text that a template makes."""
        tokens = self._tokens(text)
        tree, rest = self._parse(tokens)
        if rest:
            raise ValueError(f"{rest[0]} without a beginning")
        return self._run(tree, self._root, {})

    def _tokens(self, text: str) -> list[tuple[str, str]]:
        tokens, at = [], 0
        for found in _TOKEN.finditer(text):
            tokens += [("text", text[at : found.start()]), ("action", found[2])]
            at = found.end()
        return [*tokens, ("text", text[at:])]

    def _parse(self, tokens: list[tuple[str, str]]) -> tuple[list[Any], list[tuple[str, str]]]:
        """Nodes up to an `end`, and what follows from it on."""
        nodes: list[Any] = []
        while tokens:
            kind, content = tokens[0]
            if (kind, content) == ("action", "end"):
                return nodes, tokens
            tokens = tokens[1:]
            if kind == "action" and content.split()[0] in ("if", "range", "define"):
                body, tokens = self._parse(tokens)
                if not tokens:
                    raise ValueError(f"{content} without an end")
                tokens = tokens[1:]
                nodes.append((content, body))
            else:
                nodes.append((kind, content))
        return nodes, []

    def _run(self, nodes: list[Any], dot: Any, variables: dict[str, Any]) -> str:
        return "".join(self._node(node, dot, variables) for node in nodes)

    def _node(self, node: tuple[str, Any], dot: Any, variables: dict[str, Any]) -> str:
        head, content = node
        if head == "text":
            return str(content)
        if head == "action":
            return self._action(content, dot, variables)
        if head.startswith("define "):
            self._defined[json.loads(head.split()[1])] = content
            return ""
        if head.startswith("if "):
            return self._run(content, dot, variables) if self._value(head[3:], dot, variables) else ""
        key, item, source = _RANGE.fullmatch(head).groups()  # type: ignore[union-attr]
        found = self._value(source, dot, variables)
        pairs = sorted(found.items()) if isinstance(found, Mapping) else enumerate(found)
        return "".join(self._run(content, value, {**variables, key: name, item: value}) for name, value in pairs)

    def _action(self, text: str, dot: Any, variables: dict[str, Any]) -> str:
        first, *pipes = text.split(" | ")
        if first.startswith("include "):
            _, name, _ = first.split()
            value: Any = self._run(self._defined[json.loads(name)], self._root, {})
        else:
            value = self._value(first, dot, variables)
        for pipe in pipes:
            if pipe == "quote":
                value = json.dumps(str(value))
            elif pipe.startswith("nindent "):
                indent = " " * int(pipe.split()[1])
                value = "\n" + "\n".join(indent + line for line in str(value).splitlines())
            else:
                raise ValueError(f"unknown function {pipe!r}")
        return str(value)

    def _value(self, text: str, dot: Any, variables: dict[str, Any]) -> Any:
        if text == ".":
            return dot
        if text.startswith("not "):
            return not self._value(text[4:], dot, variables)
        if text.startswith("eq "):
            _, one, other = text.split()
            return self._value(one, dot, variables) == json.loads(other)
        if text.startswith("$"):
            return variables[text[1:]]
        if not re.fullmatch(r"(\.\w+)+", text):
            raise ValueError(f"unknown expression {text!r}")
        found: Any = self._root
        for name in text[1:].split("."):
            found = found[name]
        return found
