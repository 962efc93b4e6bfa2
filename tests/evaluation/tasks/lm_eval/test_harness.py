import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import datasets
import huggingface_hub.constants
import pytest

from ropewalk.data.read.hub import hub_reachable, offline

pytest.importorskip("lm_eval")


def test_a_hub_that_does_not_answer_is_given_up_quickly(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as silent:
        # It takes connections and never says a word.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(
            huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        assert not hub_reachable(0.2)
    # Nobody listens any more.
    assert not hub_reachable(0.2)


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_says_anything_is_there(monkeypatch, status):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert not hub_reachable()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert hub_reachable()


def test_offline_fails_at_once_and_ends(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with offline(), pytest.raises(ConnectionError, match="OfflineMode"):
        datasets.load_dataset("nobody/nothing-at-all")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE
