"""The pages in docs/ name every folder of the packages, and nothing that is not there."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
PACKAGES = ("kernels/jattn_kernels", "jattn", "models/jattn_models")
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)(?:::([\w.]+))?`")


def folders():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.parent.relative_to(ROOT).as_posix() + "/"


@functools.cache
def names_in(file):
    """Functions and classes of a module, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_every_folder_of_the_packages_has_its_line():
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    lines = {name for line in page.splitlines() for name in re.findall(r"^\| `([^`]+)` \|", line)}
    assert set(folders()) <= lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for place, name in NAMED.findall(text):
        path = ROOT / place
        assert path.exists(), f"{page.name} names {place}"
        assert not name or name in names_in(path), f"{page.name} names {place}::{name}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
