"""The documents, their code blocks, and how each block is tested.

A comment in the line before a block says so; readers do not see it:

- `<!-- runs: NAME -->`: blocks of one page with one name run one after another, in a temporary folder.
- `<!-- runs with vllm: NAME -->`: the same, where vLLM is installed (`tests/vllm/test_quickstart.py`).
- `<!-- needs WHAT: REASON -->`: cannot run in a test; its commands are checked against parsers and files.
- `<!-- shows: WHAT -->`: no commands, but a file's content or output.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "protos/README.md"]
SHELL = {"sh", "console"}

_FENCE = re.compile(
    r"(?:<!-- (?P<claim>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_SEPARATORS = {"&&", "||", "|", "&", ";", "(", ")", "!"}
_KEYWORDS = {"do", "until", "while", "if", "then", "else"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `kind` and `detail` are what its comment says."""

    page: Path
    line: int
    language: str
    text: str
    kind: str
    detail: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Its simple commands, each as its words; variables that are set before a command are left out."""
        text = without_comments(self.text).replace("\\\n", " ").replace("\n", " ; ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        return split(list(lexer))


def split(words: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    redirected = False
    for word in words:
        if set(word) <= set(";&|()<>"):
            redirected = set(word) <= {">", "<"}
            if not redirected:
                found.append([])
        elif redirected:
            redirected = False
        elif found[-1] or not (word in _KEYWORDS | _SEPARATORS or re.match(r"\w+=", word)):
            found[-1].append(word)
    return [command for command in found if command]


def without_comments(text: str) -> str:
    """Shell text without the comments at the ends of its lines, which have no quotes in them."""
    return re.sub(r"(^|\s)#[^'\"\n]*$", "", text, flags=re.MULTILINE)


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        kind, _, detail = (match["claim"] or "").partition(": ")
        line = text[: match.start("language")].count("\n") + 1
        found.append(Block(page, line, match["language"], match["text"], kind, detail))
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


def stories(kind: str) -> dict[str, list[Block]]:
    """The blocks of that kind which run together, by page and name."""
    found: dict[str, list[Block]] = {}
    for block in ALL_BLOCKS:
        if block.kind == kind:
            found.setdefault(f"{block.page.relative_to(ROOT)} {block.detail}", []).append(block)
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    return _FENCE.sub("", page.read_text())


def code_spans(page: Path) -> list[str]:
    """What stands between single backquotes."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
