"""Taking the port."""

from __future__ import annotations

import pytest

from lamina.errors import ConfigurationInvalid
from lamina.wiring.listener import base_url, listen


def test_port_0_takes_a_free_one() -> None:
    """And the address names it."""
    with listen("127.0.0.1", 0) as listener:
        assert base_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert listener.getsockname()[1] > 0


def test_all_addresses_are_called_by_the_local_one() -> None:
    """0.0.0.0 is no address to connect to."""
    with listen("0.0.0.0", 0) as listener:
        assert base_url(listener).startswith("http://127.0.0.1:")


def test_a_taken_port_names_the_way_out() -> None:
    """Also while nobody accepts on it yet."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(ConfigurationInvalid, match=f"Port {port} on 127.0.0.1 is in use.*--port"),
            listen("127.0.0.1", port),
        ):
            pass


def test_a_port_is_free_again_at_once() -> None:
    """A restart does not wait for the kernel."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
    with listen("127.0.0.1", port):
        pass


def test_a_wrong_host_is_named() -> None:
    """The resolver's reason is passed on."""
    with pytest.raises(ConfigurationInvalid, match="no address to listen on"), listen("not a host", 0):
        pass
