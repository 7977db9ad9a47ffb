"""A setting of JAX has another value while anyone asks for it."""

from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jattn.jax_setting import JaxSetting

NAME = "jax_traceback_in_locations_limit"


@pytest.fixture
def setting():
    before = getattr(jax.config, NAME)
    assert before != 3
    yield JaxSetting(NAME, 3)
    assert getattr(jax.config, NAME) == before


def value():
    return getattr(jax.config, NAME)


def test_it_is_held_until_the_last_one_leaves(setting):
    outer, inner = setting.held(), setting.held()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert setting.is_held
    assert value() == 3
    inner.__exit__(None, None, None)
    assert not setting.is_held


def test_it_is_held_in_every_thread(setting):
    with setting.held(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(value).result() == 3


def test_an_error_lets_it_go(setting):
    with pytest.raises(KeyError), setting.held():
        raise KeyError
    assert not setting.is_held


def test_what_it_was_set_to_before_is_put_back(setting):
    before = value()
    jax.config.update(NAME, 7)
    try:
        with setting.held():
            assert value() == 3
        assert value() == 7
    finally:
        jax.config.update(NAME, before)


def test_whoever_asks_is_told_of_each_change():
    changes = []
    setting = JaxSetting(NAME, 3, lambda: changes.append(value()))
    before = value()
    with setting.held():
        assert changes == [3]
    assert changes == [3, before]
