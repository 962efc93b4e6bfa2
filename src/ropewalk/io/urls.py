"""Credentials in URLs: user and password, and the values of a query, such as a signature. They are shown and stored
nowhere; whatever needs them takes them from the URL that the user gives, each time."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

MASK = "***"
"""Stands for a credential in what is shown and stored."""

SHORTEST = 8
"""Characters from which a credential is replaced inside foreign text; a shorter one may be an ordinary word there."""

# Several addresses may follow each other, separated by commas, and punctuation of a sentence may follow the last. Only
# at the start of a word, which keeps the search linear.
_URL = re.compile(
    r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*:/[^\s'\"<>`]+?(?=,[a-z][a-z0-9+.-]*://|[,.:;)]{0,3}(?:[\s'\"<>`]|$))",
    re.IGNORECASE,
)
# As a path, a URL has lost one of its slashes; a file has no host.
_PARTS = re.compile(
    r"(?P<start>file:(?://)?|[^:/]+:/{1,2})(?P<host>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)


def masked(text: str) -> str:
    """Return a text with the credentials of every URL in it replaced by ``***``.

    Every value of a query is replaced, because each service names its signature or key otherwise.

    Example:
        >>> masked("https://me:pw@host/run?sig=abc&sv=2")
        'https://***@host/run?sig=***&sv=***'
    """
    return _URL.sub(lambda found: _masked(found[0]), text)


def _masked(url: str) -> str:
    parts = _PARTS.fullmatch(url)
    assert parts is not None
    host = parts["host"]
    if "@" in host:
        host = f"{MASK}@{host.rpartition('@')[2]}"
    # What stands in place of a port may be a password that was cut at a comma or a slash.
    name, colon, port = host.rpartition(":")
    if colon and not port.isdigit() and not host.endswith("]"):
        host = f"{name}:{MASK}"
    # A value ends at the next key; a query without a key is masked as a whole.
    rest = re.sub(r"([?&;#][^=&;#]*=)[^&;#]*", rf"\1{MASK}", parts["rest"])
    rest = re.sub(r"([?&;])[^=&;#]+(?=[&;#]|$)", rf"\1{MASK}", rest)
    return f"{parts['start']}{host}{parts['path']}{rest}"


def credentials(url: str) -> list[str]:
    """Return the credentials of a URL in each form in which a message may repeat them, the longest first."""
    try:
        parts = urlsplit(url)
        user, password = parts.username or "", parts.password or ""
    except ValueError:
        return []
    pair = f"{unquote(user)}:{unquote(password)}"
    values = [value for item in re.split("[&;]", parts.query) for value in [item.partition("=")[2] or item]]
    found = {parts.query, parts.fragment, *values}
    if user or password:
        # The header of basic authentication.
        found |= {pair, base64.b64encode(pair.encode()).decode(), password or user}
    found |= {unquote(each) for each in found}
    return sorted(found - {""}, key=lambda each: (-len(each), each))


def without(text: str, secrets: Iterable[str], shortest: int = SHORTEST) -> str:
    """Return a text with each of the secrets replaced by ``***``, also where JSON has escaped its characters.

    Args:
        text: foreign text, such as an error message.
        secrets: longer ones first, so that none is left in part.
        shortest: characters of the shortest secret that is replaced.
    """
    for secret in secrets:
        if len(secret) >= shortest:
            forms = (secret, *(json.dumps(secret, ensure_ascii=each)[1:-1] for each in (True, False)))
            for form in forms:
                text = text.replace(form, MASK).replace(form.replace("/", "\\/"), MASK)
    return text
