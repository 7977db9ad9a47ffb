"""The names, arguments, defaults and fields of the surfaces that engines already know are there: seed_surface.toml."""

import ast
import dataclasses
import functools
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

SURFACE = tomllib.loads((Path(__file__).parent / "seed_surface.toml").read_text(encoding="utf-8"))
NAMES = [(section, entry) for section, content in SURFACE.items() for entry in content["names"]]
LEFT_OUT = [(section, entry) for section, content in SURFACE.items() for entry in content.get("left_out", ())]


def label(value):
    return value["name"] if isinstance(value, dict) else value


def found(section, entry):
    """What goes by an entry's name."""
    module = importlib.import_module(entry.get("module", SURFACE[section]["module"]))
    return functools.reduce(getattr, entry["name"].split("."), module)


def has(thing, name):
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    return name in fields or hasattr(thing, name)


@pytest.mark.parametrize(("section", "entry"), NAMES, ids=label)
def test_name_has_the_arguments_and_fields_that_users_know(section, entry):
    assert not set(entry) - {"name", "module", "kind", "arguments", "added", "without", "fields"}
    thing = found(section, entry)
    assert [name for name in entry.get("fields", ()) if not has(thing, name)] == []
    if "arguments" not in entry:
        return
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    added = entry.get("added", [])
    assert set(added) <= {p.name for p in parameters}
    known = [p for p in parameters if p.name not in added]
    expected = [argument.partition("=")[::2] for argument in entry["arguments"]]
    assert [p.name for p in known] == [name for name, _ in expected]
    for parameter, (name, default) in zip(known, expected, strict=True):
        assert parameter.default == (ast.literal_eval(default) if default else parameter.empty), name
    assert not set(entry.get("without", {})) & {p.name for p in parameters}


@pytest.mark.parametrize(("section", "entry"), LEFT_OUT, ids=label)
def test_name_that_is_left_out_is_not_there(section, entry):
    *path, name = entry["name"].split(".")
    module = importlib.import_module(entry.get("module", SURFACE[section]["module"]))
    assert not has(functools.reduce(getattr, path, module), name)
    assert entry["reason"]
