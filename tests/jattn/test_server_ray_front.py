"""The front's choice among replicas on Ray Serve: by what bodies begin with, and by load."""

import asyncio
import json
import types

import pytest

pytest.importorskip("ray.serve")

from jattn.server.ray_front import Asked, PrefixRouter, blocks_of

REPLICAS = [types.SimpleNamespace(replica_id=name) for name in "abc"]


def body(said, field="prompt", **more):
    return json.dumps({field: said, **more}).encode()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (body("x" * 700), body("x" * 700), 5),
        (body("x" * 700), body("x" * 300 + "y" * 400), 2),
        (body("x" * 700), body("y" * 700), 0),
        (body("x" * 700, cache_salt="s"), body("x" * 700), 0),
        (body(["x" * 700]), body(["x" * 700, "y"]), 5),
        (body(list(range(400))), body([*range(200), *range(300)]), 7),
        (
            body([{"role": "user", "content": "x" * 300}], "messages"),
            body([{"role": "user", "content": "x" * 200 + "y" * 99}], "messages"),
            1,
        ),
        (body("x"), body("x"), 0),
        (b"{", b"[1]", 0),
        (b"[" * 100_000, b"", 0),
        (body(None), body(""), 0),
    ],
)
def test_bodies_that_begin_alike_have_blocks_in_common(one, other, alike):
    first, second = blocks_of(one), blocks_of(other)
    assert [a == b for a, b in zip(first, second, strict=False)].count(True) == alike
    assert first[:alike] == second[:alike]


def test_no_more_of_a_body_is_looked_at_than_is_of_use():
    assert len(blocks_of(body("x" * 10**6))) == 1024


@pytest.fixture
def router(monkeypatch):
    """One that Ray has told how many requests each replica has; without Ray's own start."""
    found = object.__new__(PrefixRouter)
    found.initialize_state()
    found.number = {}
    monkeypatch.setattr(PrefixRouter, "replica_queue_len_cache", property(lambda self: self.number))
    return found


def pending(*blocks):
    asked = Asked({}, b"", blocks)
    return types.SimpleNamespace(args=[asked], routing_context=types.SimpleNamespace(should_backoff=False))


def chosen(router, request, replicas=REPLICAS):
    """The first choice and the second."""
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    return ["".join(sorted(replica.replica_id for replica in rank)) for rank in ranks]


def test_a_replica_that_was_sent_the_most_of_a_beginning_is_chosen(router):
    assert chosen(router, pending(1, 2, 3)) == ["abc", ""]
    router.on_request_routed(pending(1, 2, 3), "a", None)
    router.on_request_routed(pending(1, 9), "b", None)
    assert chosen(router, pending(1, 2, 3, 4)) == ["a", "bc"]
    assert chosen(router, pending(1, 9)) == ["b", "ac"]
    assert chosen(router, pending(1, 8)) == ["ab", "c"]
    assert chosen(router, pending(7, 2, 3)) == ["abc", ""]
    assert chosen(router, pending()) == ["abc", ""]
    assert chosen(router, None) == ["abc"]
    assert chosen(router, pending(1, 2, 3), REPLICAS[1:]) == ["b", "c"]  # a has ended


def test_a_replica_with_far_more_to_do_is_not_waited_for(router):
    router.on_request_routed(pending(1, 2), "a", None)
    router.number = {"a": 18, "b": 2, "c": 30}
    assert chosen(router, pending(1, 2)) == ["a", "bc"]
    router.number["a"] = 19
    assert chosen(router, pending(1, 2)) == ["abc", ""]


def test_the_oldest_beginnings_are_forgotten(router, monkeypatch):
    monkeypatch.setattr("jattn.server.ray_front._MOST_BLOCKS", 4)
    for replica, blocks in zip("abc", ((1, 2), (3, 4), (5, 6)), strict=True):
        router.on_request_routed(pending(*blocks), replica, None)
    assert chosen(router, pending(1, 2)) == ["abc", ""]
    assert chosen(router, pending(3, 4)) == ["b", "ac"]
