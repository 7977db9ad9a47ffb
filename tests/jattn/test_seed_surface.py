"""The names, arguments, kinds, defaults and fields of the surfaces that engines know are there: seed_surface.toml."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

SURFACE = tomllib.loads((Path(__file__).parent / "seed_surface.toml").read_text(encoding="utf-8"))
KEYS = {"name", "module", "arguments", "added", "inserted", "without", "fields", "differs", "keyword_only"}


def entries(kind):
    return [(section, entry) for section, content in SURFACE.items() for entry in content.get(kind, ())]


def label(value):
    return value["name"] if isinstance(value, dict) else value


def module_of(section, entry):
    return importlib.import_module(entry.get("module", SURFACE[section]["module"]))


def found(section, entry):
    """What goes by an entry's name."""
    return functools.reduce(getattr, entry["name"].split("."), module_of(section, entry))


def has(thing, name):
    return name in fields_of(thing) or hasattr(thing, name)


def fields_of(thing):
    return {field.name: field for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}


def named_defaults(names):
    """Names, and their defaults as Python has them; none where there is none."""
    parts = [name.partition("=") for name in names]
    return {name: ast.literal_eval(default) if sign else inspect.Parameter.empty for name, sign, default in parts}


def same(default, expected):
    return default == expected and isinstance(default, bool) == isinstance(expected, bool)


@pytest.mark.parametrize(("section", "entry"), entries("names"), ids=label)
def test_name_has_the_arguments_and_fields_that_users_know(section, entry):
    assert not set(entry) - KEYS
    thing = found(section, entry)
    check_fields(thing, entry)
    if "arguments" in entry:
        check_arguments(thing, entry)


def check_fields(thing, entry):
    expected = named_defaults(entry.get("fields", ()))
    assert [name for name in expected if not has(thing, name)] == []
    fields, differs = fields_of(thing), entry.get("differs", {})
    for name, default in expected.items():
        if default is not inspect.Parameter.empty:
            # A field that is required has dataclasses.MISSING, and a property none.
            assert same(getattr(fields.get(name), "default", dataclasses.MISSING), default) != (name in differs), name
    assert set(differs) <= set(expected)
    assert all(differs.values())
    assert entry.get("keyword_only", "why")
    if fields:
        assert any(field.kw_only for field in fields.values() if field.name in expected) == ("keyword_only" in entry)


def check_arguments(thing, entry):
    parameters = {p.name: p for p in inspect.signature(thing).parameters.values() if p.name != "self"}
    added, inserted = set(entry.get("added", ())), entry.get("inserted", {})
    assert added | set(inserted) <= set(parameters)
    assert all(inserted.values())
    expected = named_defaults(entry["arguments"])
    assert [name for name in parameters if name not in added | set(inserted)] == list(expected)
    for name, default in expected.items():
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, name
        assert same(parameters[name].default, default), name
    in_order = [p.name for p in parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    known = [name for name in in_order if name not in added]
    assert in_order[: len(known)] == known
    assert not set(entry.get("without", {})) & set(parameters)


def test_readme_says_where_each_name_is():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^## You know it from elsewhere\n(.*?)^## ", readme, re.DOTALL | re.MULTILINE)[1]
    names = {part for _, entry in entries("names") for part in entry["name"].split(".")[:1] if not part.startswith("_")}
    assert {name for name in names if not re.search(rf"\b{name}\b", table)} == set()


@pytest.mark.parametrize(("section", "entry"), entries("renamed"), ids=label)
def test_name_that_is_another_here_is_there_by_that_name(section, entry):
    assert has(module_of(section, entry), entry["here"])
    assert not has(module_of(section, entry), entry["name"])
    assert entry["reason"]


@pytest.mark.parametrize(("section", "entry"), entries("left_out"), ids=label)
def test_name_that_is_left_out_is_not_there(section, entry):
    *path, name = entry["name"].split(".")
    assert not has(functools.reduce(getattr, path, module_of(section, entry)), name)
    assert entry["reason"]
