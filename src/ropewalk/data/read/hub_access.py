"""Is the Hugging Face hub there? Asked once and quickly: the libraries themselves try for half a minute each."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5.0
"""How long the hub may take to say anything at all."""


def hub_reachable(seconds: float = SECONDS) -> bool:
    """Whether the hub answers, whatever it says; False too where the user asked for offline mode.

    Args:
        seconds: how long to wait.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except urllib.error.URLError as error:
        # Python's certificates may be others than those of the hub's client, which is to decide by itself.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


@contextmanager
def offline() -> Iterator[None]:
    """While open, the hub's libraries use what they have kept on disk, and fail at once where it is not there."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
