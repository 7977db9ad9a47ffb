"""Where a server listens: who else does it is told of, and who has ended does not matter."""

import socket

import pytest

from jattn.server.run import Lifetime, bound_socket, run
from jattn.server.service import ServiceOptions
from jattn.serving.frontend.llm import LLM


def test_an_address_that_another_server_has_bound_is_refused_before_it_listens():
    with bound_socket("127.0.0.1", 0) as bound, pytest.raises(ValueError, match="Address already in use"):
        bound_socket(*bound.getsockname())


def test_run_tells_that_somebody_else_listens_by_now():
    with socket.socket() as other, socket.socket() as bound:
        for each in (other, bound):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        bound.bind(other.getsockname())
        other.listen()
        options, lifetime = ServiceOptions(model_names=("m",)), Lifetime()
        with pytest.raises(ValueError, match="must be an address to be had: Address already in use"):
            run(object.__new__(LLM), options, bound, lifetime, lambda: None)


def test_an_address_can_be_had_again_while_a_servers_last_connections_linger():
    with bound_socket("127.0.0.1", 0) as bound:
        address = bound.getsockname()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen()
        with socket.create_connection(address) as client:
            served, _ = bound.accept()
            served.close()  # whoever closes first lingers
            assert client.recv(1) == b""
    with bound_socket(*address):
        pass
