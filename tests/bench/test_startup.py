"""Figures of a start: spans and calls by name, a column for each start."""

from importlib import metadata

import pytest

from bench import startup


def test_spans_and_calls_are_added_up_by_name():
    class Owner:
        def found(self, what):
            return what

    figures = startup.Figures()
    figures.timed(Owner, "found", "load")
    for what in (1, None, 2):
        assert Owner().found(what) == what
    assert figures.values["load calls"] == 2
    assert 0 < figures.values["load"] < 1


def test_table_has_a_line_for_each_name_and_a_column_for_each_start():
    text = startup.table([{"import": 2.0, "compile": 9.5}, {"import": 1.0, "load": 0.25}])
    assert [line.split() for line in text.splitlines()] == [
        ["first", "second"],
        ["import", "2.00", "1.00"],
        ["compile", "9.50"],
        ["load", "0.25"],
    ]


def test_a_child_that_fails_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match="gone wrong"):
        startup.started(["-c", "raise SystemExit('gone wrong')"], str(tmp_path))
    figures, warnings = startup.started(["-c", "import sys; sys.stderr.write('W0101 12:00:00 rematerialised\\n')"], "")
    assert figures["process"] > 0
    assert warnings == ["W0101 12:00:00 rematerialised"]


def test_sources_that_are_not_installed_announce_their_models_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "entry_points", lambda group: ())
    startup.announce(tmp_path)
    found = next(iter(metadata.distributions(path=[str(tmp_path / "path")]))).entry_points
    assert {"LlamaForCausalLM", "default"} <= {point.name for point in found}
