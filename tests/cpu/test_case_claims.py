"""Every case from the field is claimed by a test: `@pytest.mark.field_case(n)`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = range(1, 11)
# Cases whose fault shows on the card alone: a test without one would claim them in name only.
NEED_A_GPU = {*range(1, 11)}


def claims(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each test of a file with each number that it is marked with."""
    for node in ast.parse(path.read_text(), str(path)).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.field_case":
                for number in mark.args:
                    yield f"{path.relative_to(TESTS)}::{node.name}", ast.literal_eval(number)


@pytest.fixture(scope="module")
def claimed() -> dict[int, list[str]]:
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for test, number in claims(path):
            found[number].append(test)
    return found


@pytest.mark.parametrize("number", CASES)
def test_every_case_is_claimed(claimed: dict[int, list[str]], number: int) -> None:
    tests = claimed.get(number, [])
    assert tests, f"no test is marked field_case({number})"
    if number in NEED_A_GPU:
        assert any(test.startswith("gpu/") for test in tests), f"only {tests} claim case {number}"


def test_no_other_case_is_claimed(claimed: dict[int, list[str]]) -> None:
    assert set(claimed) <= set(CASES)
