"""Steps of a model that several devices share: a row for each number of devices and each batch."""

import functools
import json

from bench import tensor_parallel_step
from bench.decode_step import random_model
from tests.bench.test_decode_step import TOY


def test_rows_say_how_many_devices_there_were(monkeypatch, capsys):
    monkeypatch.setattr(tensor_parallel_step, "random_model", functools.partial(random_model, TOY))
    tensor_parallel_step.main(["--tensor-parallel", "1,2", "--batch", "2:24", "--page", "16", "--steps", "4"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tensor_parallel"] for row in rows] == [1, 2]
    assert all(row["batch"] == 2 and row["ctx"] == 24 and row["time_ms"] > 0 for row in rows)
