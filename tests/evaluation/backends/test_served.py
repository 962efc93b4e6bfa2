"""What a server says of its context is taken as it is meant, and what it does not say is not guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ropewalk.evaluation.backends.served import Served, from_models, from_props, from_server_info, names_model

READ: list[Callable[[bytes], Served]] = [lambda body: from_models(body, "tiny"), from_props, from_server_info]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"null", b"{}", b"[" * 100_000, b'{"data": [5]}', b'{"data": {}}']
)
def test_other_words_say_nothing(read: Callable[[bytes], Served], body: bytes) -> None:
    assert read(body) == Served()


@pytest.mark.parametrize("odd", [None, 0, -1, True, "4096", 4096.0, []])
def test_a_length_that_is_no_number_of_tokens_is_not_one(odd: Any) -> None:
    assert (
        from_models(json.dumps({"data": [{"id": "tiny", "max_model_len": odd}]}).encode(), "tiny") == Served()
    )
    assert from_props(json.dumps({"default_generation_settings": {"n_ctx": odd}}).encode()) == Served()
    assert from_server_info(json.dumps({"context_length": odd}).encode()) == Served()


def test_the_entry_of_the_model_counts_and_what_is_unknown_is_left_out_of_the_record() -> None:
    entries = [{"id": "other", "max_model_len": 1}, {"id": "tiny", "max_model_len": 7, "root": ""}]
    found = from_models(json.dumps({"data": entries}).encode(), "tiny")
    assert found.to_json() == {"context": 7, "source": "max_model_len in /v1/models"}
    assert from_models(json.dumps({"data": entries}).encode(), "third") == Served()


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("m", "m"),
        ("gpt-4o", "gpt-4o-2024-08-06"),
        ("gpt-3.5-turbo", "gpt-3.5-turbo-0125"),
        ("claude-latest", "claude-20241022"),
        ("org/Model", "org/Model@main"),
        ("org/Model", "model"),
        ("llama3", "llama3:latest"),
        ("/models/a.gguf", "a"),
        # The checkpoint that was loaded, and the first of several names of one checkpoint.
        ("alias", "/data/checkpoint"),
        ("alias", "checkpoint"),
        ("alias", "second-alias"),
    ],
)
def test_names_of_one_model(asked: str, answered: str) -> None:
    assert names_model(LISTED, asked, answered)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("m", "other-model-7b"),
        ("m", "m-7b"),
        ("qwen-7b", "qwen-7b-instruct"),
        ("llama3:8b", "llama3:70b"),
        # A LoRA adapter and the model below it.
        ("base:adapter", "base"),
        ("adapter", "alias"),
        ("without-root", "another-without-root"),
    ],
)
def test_names_of_two_models(asked: str, answered: str) -> None:
    assert not names_model(LISTED, asked, answered)
    assert not names_model(b"", asked, answered)


LISTED = json.dumps(
    {
        "data": [
            {"id": "alias", "root": "/data/checkpoint"},
            {"id": "second-alias", "root": "/data/checkpoint"},
            {"id": "adapter", "root": "/data/adapter", "parent": "alias"},
            {"id": "without-root"},
            {"id": "another-without-root"},
        ]
    }
).encode()
