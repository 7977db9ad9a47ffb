"""Ctrl-C while `jattn generate` runs: quiet, after a whole delta, and never lost."""

import contextlib
import signal

import pytest

from jattn.cli.interrupts import Interrupts
from jattn.cli.output import starting
from tests.jattn.harness.fake_llm import Delta, generate


@pytest.mark.parametrize("where", ["init_error", "stream_error"])
def test_generate_interrupt_is_quiet(llm, where):
    setattr(llm, where, KeyboardInterrupt())
    result = generate("--prompt", "x")
    assert result.exit_code == 130
    assert result.stderr == ""


@pytest.mark.parametrize("presses", [1, 2])
def test_generate_interrupt_waits_for_the_delta_and_the_second_does_not(llm, presses):
    class Deltas:
        made = 0

        def __iter__(self):
            for text in "abc":
                self.made += 1
                if text == "b":
                    for _ in range(presses):
                        signal.raise_signal(signal.SIGINT)
                yield Delta(0, text)

    llm.deltas = Deltas()
    result = generate("--prompt", "x")
    assert result.exit_code == 130
    assert result.stdout == {1: "ab", 2: "a"}[presses]
    assert llm.deltas.made == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_generate_interrupt_that_got_lost_while_loading_still_counts(llm):
    def init(self, *_, **__):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    llm.__init__ = init
    result = generate("--prompt", "x")
    assert (result.exit_code, result.stdout) == (130, "")


@pytest.mark.parametrize("error", [None, ImportError("Encountered an error while initializing the extension.")])
def test_interrupt_that_an_import_makes_another_error_of_still_counts(error):
    def load():
        with starting():
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        load()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_generate_leaves_an_ignored_interrupt_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert list(interrupts.deltas([1, 2])) == [1, 2]
    finally:
        signal.signal(signal.SIGINT, before)
