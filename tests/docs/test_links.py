"""Paths, links, settings and metrics that the documents name exist; what is generated is up to date."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvd.daemon.config import Config
from kvd.engines.sglang.settings import VARIABLE
from tests.docs.pages import ALL_BLOCKS, PAGES, ROOT, code_spans

TOP = r"(?:kvd|tests|docs|deploy|benchmarks|protos|requirements|\.ci)"
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "kvd").rglob("*.py")))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_every_link_leads_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: no heading {target}"


@EVERY_PAGE
def test_every_path_of_the_repository_exists(page) -> None:
    for span in code_spans(page):
        for path in re.findall(rf"(?<![\w/.-]){TOP}/[\w./@*-]+", span):
            assert list(ROOT.glob(path.rstrip("./"))), f"{page.name}: {path}"


def test_the_tests_that_a_comment_of_a_block_names_exist() -> None:
    for block in ALL_BLOCKS:
        for path in re.findall(r"tests/[\w./]+", block.detail):
            assert (ROOT / path).exists(), f"{block.place}: {path}"


@EVERY_PAGE
def test_every_variable_is_a_setting(page) -> None:
    for name in re.findall(r"\bKVD_([A-Z_]+)\b", page.read_text()):
        known = name.lower() in Config.model_fields or name.startswith(("FUZZ_", "TEST_"))  # the tests' own
        known |= f"KVD_{name}" == VARIABLE
        assert known, f"{page.name}: KVD_{name} is no setting"


@EVERY_PAGE
def test_every_metric_and_field_is_in_the_code(page) -> None:
    for name in re.findall(r"(?<![\w.])(?:vllm:)?kvd_[a-z_]+\b", page.read_text()):
        assert name in SOURCE or name.removesuffix("_total") in SOURCE, f"{page.name}: {name}"


def test_the_table_of_settings_is_the_one_that_the_code_makes() -> None:
    assert (ROOT / "docs/settings.md").read_text() == load("docs/settings.py").page(), "run: python docs/settings.py"


def test_the_pictures_are_what_the_script_draws(tmp_path) -> None:
    for name, drawing in load("docs/images/diagrams.py").pictures().items():
        assert (ROOT / "docs/images" / name).read_text() == drawing, "run: python docs/images/diagrams.py"


def test_the_page_about_the_parts_says_where_these_changes_go() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE))
    for change in (
        "the rule of a sliding window",
        "how long a claim waits for its offer",
        "what a status prints",
        "which NIXL backend is used",
        "what a worker hears when its daemon restarts",
    ):
        assert re.search(r"`kvd/[\w/]+\.py`", rows[change]), change


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
