"""Credentials of a URL are replaced in whatever shows or stores it, and nothing else is."""

import base64
import json
import re
import time

import pytest

from ropewalk.io.urls import credentials, masked, without


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/run?sig=abc&sv=2", "https://***@host/run?sig=***&sv=***"),
        ("http://token@host:8000/v1", "http://***@host:8000/v1"),
        ("http://u:p@ss@h/x", "http://***@h/x"),
        ("http://a:b@h:80/v1,http://c:d@e/v1", "http://***@h:80/v1,http://***@e/v1"),
        # A password with a comma ends the first of two addresses.
        ("http://me:secret", "http://me:***"),
        ("file:///mnt/a@b/run?sig=S", "file:///mnt/a@b/run?sig=***"),
        ("file:/mnt/run?sig=S", "file:/mnt/run?sig=***"),
        ("https://h/x?SECRET", "https://h/x?***"),
        ("https://h/x#access_token=1", "https://h/x#access_token=***"),
        (
            "cannot read 's3://b/k?X-Amz-Credential=A/b&X-Amz-Signature=f00': no",
            "cannot read 's3://b/k?X-Amz-Credential=***&X-Amz-Signature=***': no",
        ),
        ("https:/me:pw@host/x?token=a", "https:/***@host/x?token=***"),
        ("copied from s3://b/run?sig=x, with 1; (s3://b/run?sig=y).", None),
        ("s3://bucket/run", "s3://bucket/run"),
        ("see https://host/page#a-section", "see https://host/page#a-section"),
        ("http://[::1]:8000/v1 and http://[::1]/v1", "http://[::1]:8000/v1 and http://[::1]/v1"),
        ("hf:owner/name@main: no such file? none", "hf:owner/name@main: no such file? none"),
    ],
)
def test_credentials_of_urls_are_masked_and_the_rest_stays(text: str, shown: str | None) -> None:
    shown = shown or re.sub("sig=[xy]", "sig=***", text)
    assert masked(text) == shown
    assert masked(shown) == shown


def test_every_form_of_a_credential_is_replaced_in_a_servers_words() -> None:
    url = "http://me:p%40ss/word%22@host/v1?sig=a%2Bbcdefgh&sv=2"
    url = url.replace("/word", "%2Fword")
    header = base64.b64encode(b'me:p@ss/word"').decode()
    said = (
        f'Basic {header}, p@ss/word" and {json.dumps("p@ss/word" + chr(34))} or p%40ss%2Fword%22, a+bcdefgh'
    )
    for escaped in (said, said.replace("/", "\\/")):
        found = without(escaped, credentials(url))
        for secret in (header, "ss", "word", "bcdefgh"):
            assert secret not in found
    # A short value, such as a date or a permission, is an ordinary word in foreign text.
    assert without("version 2", credentials(url)) == "version 2"
    assert without("key 2", ["2"], 1) == "key ***"


def test_a_url_without_credentials_has_none() -> None:
    for url in ("s3://bucket/run", "file:///mnt/run", "http://[::1/v1", "a folder", ""):
        assert credentials(url) == []


def test_a_long_text_is_masked_in_linear_time() -> None:
    text = "x" * 1_000_000 + " " + "a:" * 500_000
    start = time.perf_counter()
    assert masked(text) == text
    # A quadratic search would take hours.
    assert time.perf_counter() - start < 10
