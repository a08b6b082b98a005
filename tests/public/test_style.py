"""The house style, as far as a program can see it."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest
from sources import Source, sources

LINES_MAX = 800
LINES_AIM = 400
BODY_LINES_MAX = 70
COLUMNS_MAX = 100
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "base"}

CODE = ("pidurable", "extensions", "examples", "benchmarks")
TESTS = ("tests",)


def functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a body without its docstring and without inner functions, which count alone."""
    body = node.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    if not body:
        return 0
    lines = set(range(body[0].lineno, (body[-1].end_lineno or 0) + 1))
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner is not node:
            lines -= set(range(inner.lineno, (inner.end_lineno or 0) + 1))
    return len(lines)


def test_modules_are_short() -> None:
    """No module has more than 800 lines, and most have at most 400."""
    lengths = {each.place: len(each.text.splitlines()) for each in sources("pidurable")}

    assert {place: n for place, n in lengths.items() if n > LINES_MAX} == {}
    long = [place for place, n in lengths.items() if n > LINES_AIM]
    assert len(long) <= len(lengths) // 4, long


def test_bodies_are_short() -> None:
    """No function body has more than 70 lines."""
    long = [
        f"{source.place}:{node.lineno} {node.name} has {body_lines(node)}"
        for source in sources(*CODE)
        for node in functions(source)
        # Most are shorter with all that is not counted, and need no closer look.
        if (node.end_lineno or 0) - node.lineno > BODY_LINES_MAX
        if body_lines(node) > BODY_LINES_MAX
    ]

    assert long == []


@pytest.mark.parametrize("folder", [*CODE, *TESTS])
def test_lines_are_at_most_100_characters(folder: str) -> None:
    """Wide lines are hard to read side by side."""
    wide = [
        f"{source.place}:{number}"
        for source in sources(folder)
        for number, line in enumerate(source.text.splitlines(), start=1)
        # As ruff counts: without what is there for the tools.
        if len(line) > COLUMNS_MAX
        and len(re.sub(r"  # (noqa|type:|pragma).*", "", line)) > COLUMNS_MAX
    ]

    assert wide == []


def test_a_module_is_named_after_its_idea() -> None:
    """No utils, helpers, common or manager: a heap attracts more."""
    empty = [
        source.place
        for source in sources(*CODE)
        if source.path.stem.strip("_") in EMPTY_NAMES or source.path.parent.name in EMPTY_NAMES
    ]

    assert empty == []


@pytest.mark.parametrize("folder", [*CODE, *TESTS])
def test_every_module_says_what_it_is_for(folder: str) -> None:
    """The first statement of a module is a docstring in sentences."""
    silent = []
    for source in sources(folder):
        text = source.docstring
        # It may also end in its last point, table, code or command, which are no sentences.
        ends_in_a_list = text.splitlines()[-1:] and text.splitlines()[-1].startswith(
            ("*", "- ", " ", "=", "|", "Run it with: ")
        )
        if source.text.strip() and not (text.endswith((".", "?")) or ends_in_a_list):
            silent.append(source.place)

    assert silent == []


def test_no_error_is_swallowed_unseen() -> None:
    """A broad handler does something: `except Exception: pass` hides what nobody thought of."""
    silent = []
    for source in sources("pidurable", "extensions"):
        for node in source.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(each, ast.Pass | ast.Continue) for each in node.body):
                silent.append(f"{source.place}:{node.lineno}")
        silent += [
            f"{source.place}:{number}"
            for number, line in enumerate(source.text.splitlines(), start=1)
            if re.search(r"suppress\((Base)?Exception\)", line)
        ]

    assert silent == []


def test_a_test_is_a_claim_with_a_sentence() -> None:
    """Every test has a docstring that says in a sentence what its name claims."""
    silent = [
        f"{source.place}:{node.lineno} {node.name}"
        for source in sources("tests")
        if source.path.name.startswith("test_")
        for node in functions(source)
        if node.name.startswith("test_") and not (ast.get_docstring(node) or "").endswith(".")
    ]

    assert silent == []


def test_no_test_unfreezes_what_no_collection_is_to_walk() -> None:
    """Every collection after it would take the best part of a second, as `conftest.py` says."""
    for source in sources("tests"):
        # The name of an attribute stands in the text as it is: most files need no closer look.
        for node in source.nodes if "unfreeze" in source.text else ():
            found = isinstance(node, ast.Attribute) and node.attr == "unfreeze"
            assert not found, f"{source.place}: a test unfreezes"


def test_records_are_frozen_and_mutable_state_is_private() -> None:
    """A public attrs class is frozen, or an error, or a class that says why it is not."""
    mutable = []
    for source in sources("pidurable/records", "pidurable/harness"):
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            for decorator in node.decorator_list:
                text = ast.unparse(decorator)
                if text.startswith(("attrs.define", "attrs.mutable")) and "eq=False" not in text:
                    mutable.append(f"{source.place}:{node.lineno} {node.name}")

    assert mutable == []


def test_the_text_of_the_project_speaks_of_the_product() -> None:
    """No folder of a machine stands in code, tests or manual."""
    pattern = re.compile(r"(?<![\w.])/(?:home|Users|root)/\w{2,}")
    named = [
        f"{source.place}:{number}"
        for source in sources(*CODE, *TESTS)
        if pattern.search(source.text) and source.path.name != "test_style.py"
        for number, line in enumerate(source.text.splitlines(), start=1)
        if pattern.search(line)
    ]

    assert named == []


def test_every_module_of_the_tests_has_a_name_of_its_own() -> None:
    """They are imported by name alone: two of one name keep the suite from being collected."""
    names = Counter(source.path.name for source in sources(*TESTS))
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"conftest.py", "__init__.py"}
