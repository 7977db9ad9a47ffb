"""The bench of the host's time drives an engine and says where a step's time goes."""

from bench import host_time
from jattn.serving.engine import Engine
from tests.jattn.harness.tiny import one_variant


def test_parts_of_a_step_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(host_time, "_WARM_UP_STEPS", 2)
    monkeypatch.setattr(host_time, "_PROFILED_STEPS", 3)
    with one_variant("plain"):
        host_time.main(["--batch", "2", "--steps", "5", "--sampling", "nucleus", "--cpu-time"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Batch 2, nucleus: ")
    assert all(f"{part} 0." in line for part in ("plan", "arrays", "call", "take"))


def test_a_part_inside_another_counts_once():
    now = iter([0.0, 1.0, 4.0, 6.0])
    clock = host_time.Clock(lambda: next(now))
    inner = clock._timed("plan", lambda: None)
    clock._timed("step", inner)()
    assert (clock.seconds["plan"], clock.seconds["step"]) == (3.0, 3.0)


def test_clock_leaves_the_parts_as_they_were():
    before = Engine.step
    with host_time.Clock().running():
        assert Engine.step is not before
    assert Engine.step is before
