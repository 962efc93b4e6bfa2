"""Backend for servers with an OpenAI-compatible endpoint, of completions or of chats.

vLLM, SGLang, llama.cpp's server and ``transformers serve`` all have this endpoint but accept different requests: some
reject fields that OpenAI does not define, some reject token ids. A trial request for one token detects this before the
first prompt, and the backend's description and notes record the outcome.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.protocol import Answer, Endpoint, GenerationRequest, Send
from ropewalk.evaluation.prompt import END_OF_THOUGHTS, THOUGHTS
from ropewalk.io.settings import COMMON, Option, Settings, pairs

KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
"""API key that is sent if there is none: the client requires one, while self-hosted servers ignore it."""

LONGEST_BACKOFF = 8.0
"""Maximum seconds between two attempts, unless the server asks for more."""

CONNECT_TIMEOUT = 10.0
CHECK_TIMEOUT = 30.0
"""Seconds to wait for a connection (``CONNECT_TIMEOUT``), and for the list of models (``CHECK_TIMEOUT``)."""

GREEDY: Mapping[str, Any] = {"repetition_penalty": 1.0}
"""Fields that switch penalties off. vLLM takes missing fields from the checkpoint's generation_config.json, and
penalties affect greedy decoding too."""

OPENAI_GREEDY: Mapping[str, Any] = {"frequency_penalty": 0.0}
"""Replaces ``GREEDY`` if the server rejects it: ``transformers serve`` derives the repetition penalty from this
field, by adding 1."""

RESERVED = ("model", "prompt", "messages", "max_tokens", "temperature")
"""Fields of every request that determine the answer."""

UNREADABLE = ("stream", "n", "best_of", "echo", "suffix")
"""Fields that change the format of a response so that it can no longer be read as one answer."""

TRIAL = "The grass is green."
"""Prompt of the trial request."""

SHOWN_MODELS = 5

TOO_MANY = 429
"""HTTP status of a server at its rate limit."""


class RefusalError(Exception):
    """The server rejects a request permanently; retrying would not help.

    Attributes:
        status: HTTP status; None if the response was successful but not usable.
        named: fields of the request that the server's message names.
    """

    def __init__(self, reason: str, status: int | None = None, named: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.named = status, named


def _json_values(value: Any) -> Any:
    """Parse additional request fields, given as a mapping or as ``KEY=VALUE`` texts with JSON values."""
    if isinstance(value, Mapping):
        check_extra(value)
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for name, text in pairs(value, example="top_k=1").items():
        try:
            found[name] = json.loads(text)
        # Thousands of nested brackets exceed Python's recursion limit inside json.
        except (ValueError, RecursionError):
            raise ValueError(
                f"{name}={text}: {text!r} is not a JSON value; write a string as {name}='{json.dumps(text)}'"
            ) from None
    check_extra(found)
    return found


class Serving(Settings):
    """Address of a model server and the format of its requests.

    Attributes:
        url: address of the server, including its path; several servers of one model are separated by commas.
        model: name of the model on the server; None if it serves only one.
        concurrency: maximum number of concurrent requests.
        timeout: seconds without data from the server after which an attempt fails.
        retries: additional attempts per prompt after a lost connection, a timeout, HTTP 408, 429 or 5xx, or an
            unreadable response.
        send: ``ids`` sends token ids, including BOS. ``text``, for servers that reject ids, sends a text that the
            tokenizer encodes as the same ids: without BOS if the tokenizer adds it, otherwise with BOS written out.
            ``auto`` sends ids, or text if the server rejects ids.
        extra: additional fields of every request, JSON values.
        endpoint: ``completions`` sends whole prompts. ``chat``, for servers that have no other, sends turns, to which
            the server applies its own template.
    """

    group: ClassVar[str | None] = "Server"

    url: Annotated[str, Option(name="--server", metavar="URL", group=COMMON.group)] = Field(
        description="Measure the model on this OpenAI-compatible server, such as http://localhost:8000/v1. Several "
        "addresses, separated by commas, share the prompts. The API key is read from OPENAI_API_KEY."
    )
    model: Annotated[str | None, Option(name="--server-model")] = Field(
        None, description="Name of the model on the server. Default: its only model."
    )
    concurrency: int = Field(8, ge=1, description="Maximum number of concurrent requests.")
    timeout: float = Field(
        600.0, gt=0, description="Seconds without data from the server after which a request fails."
    )
    retries: int = Field(4, ge=0, description="Number of retries of a failed request.")
    send: Send = Field(
        "auto",
        description="Format of prompts: ids (token ids), text (for servers that reject ids), or auto (ids if the "
        "server accepts them, else text).",
    )
    endpoint: Endpoint = Field(
        "completions",
        description="Endpoint: completions, or chat for servers without completions, which apply the chat template "
        "themselves. chat needs --chat.",
    )
    extra: Annotated[
        dict[str, Any],
        BeforeValidator(_json_values),
        Option(name="--server-extra", metavar="KEY=VALUE", repeated=True),
    ] = Field(
        {},
        description="Add this field to every request, with its value as JSON, such as top_k=1. May be repeated.",
    )


class ServerBackend:
    """Gets greedy answers from a server.

    Args:
        serving: address of the server and format of its requests. Fields of ``extra`` are always sent and override
            ``GREEDY``.
        tokenizer: the model's tokenizer; needed to send text. The server must use the same one.
        api_key: API key; None reads ``OPENAI_API_KEY`` from the environment. It is never printed or recorded.
        backoff: seconds before the second attempt; doubles with each further attempt, up to 8.

    Raises:
        RopewalkError: if the openai package is missing, or an argument is invalid.
    """

    def __init__(
        self, serving: Serving, tokenizer: Any = None, api_key: str | None = None, backoff: float = 0.5
    ) -> None:
        if not 0 <= backoff < math.inf:
            raise RopewalkError(f"backoff must be 0 or more seconds, got {backoff}")
        if serving.send == "text" and tokenizer is None:
            raise RopewalkError("send=text needs the model's tokenizer; pass the tokenizer, or set send=ids")
        self._openai = _openai()
        self.address = public_address(serving.url)
        self.model = serving.model
        self.tokenizer = tokenizer
        self.concurrency, self.timeout, self.retries = serving.concurrency, serving.timeout, serving.retries
        self.backoff = backoff
        self.extra = serving.extra
        self.notes: list[str] = []
        """Notes for the user about the answers; complete after :meth:`check`."""
        self.as_turns = serving.endpoint == "chat"
        self._auto = serving.send == "auto"
        self._text_sent = serving.send == "text"
        self._own = {name: value for name, value in GREEDY.items() if name not in self.extra}
        self._left_out: list[str] = []
        self._bos_added = tokenizer is not None and _adds_bos(tokenizer)
        self._tokenizer_lock = threading.Lock()
        self._base_url = serving.url
        self._api_key = _key(api_key)
        self._checked = False

    @property
    def description(self) -> dict[str, Any]:
        """Kind, address, model (if known) and format of requests; complete after :meth:`check`."""
        return {
            "kind": "server",
            "address": self.address,
            **({} if self.model is None else {"model": self.model}),
            "prompts": "turns" if self.as_turns else "text" if self._text_sent else "ids",
            **({"extra": self.extra} if self.extra else {}),
            **({"left_out": self._left_out} if self._left_out else {}),
        }

    def check(self) -> str:
        """Find the model on the server, and detect with a trial request what the server accepts.

        Fields of ``GREEDY`` that the server rejects are omitted, and ``auto`` switches from ids to text if needed; the
        notes report both. A named model need not be in the server's list: ``transformers serve`` lists the models in
        the Hub cache.

        Returns:
            The name of the model on the server.

        Raises:
            RopewalkError: if the server cannot be reached, does not serve the model, or rejects fields that determine
                the answer.
        """
        listed: list[str] | None = None
        # A working server lists its models at once; a wrong address should not take the ten minutes of an answer.
        with self._client(min(self.timeout, CHECK_TIMEOUT)) as client:
            try:
                listed = read_models(self._content(client.models.with_raw_response.list))
            except FaultError as fault:
                # With a named model, a list that fails with an HTTP status does not matter: the server is there.
                if self.model is None or fault.status is None:
                    raise RopewalkError(
                        f"no model server responds at {self.address} ({fault.reason}); start it, or give another "
                        "address"
                    ) from fault
            except RefusalError as refusal:
                if self.model is None:
                    raise RopewalkError(
                        f"the server at {self.address} does not list its models ({refusal}); an OpenAI-compatible "
                        "address usually ends in /v1"
                    ) from refusal
        self.model = self.model or self._only(listed or [])
        with self._client(self.timeout) as client:
            self._agree(client, listed)
        self._checked = True
        return self.model

    def _agree(self, client: Any, listed: list[str] | None) -> None:
        """Send the trial request with fewer and fewer optional fields until the server accepts it."""
        written_otherwise = False
        while True:
            ids = self._trial()
            turns = (("user", TRIAL),) if self.as_turns else ()
            try:
                read = self._completion_with_retries(
                    client, GenerationRequest(ids, 1, len(ids) + 1, turns), threading.Event()
                ).prompt_tokens
            except FaultError as fault:
                raise RopewalkError(
                    f"the server at {self.address} does not respond ({fault.reason}); restart it, or give another "
                    "address"
                ) from fault
            except RefusalError as refusal:
                self._do_without(refusal, listed)
                continue
            # A server that reports no usage gives nothing to compare.
            if not self._text_sent or not read or read == len(ids):
                return
            # The server may add BOS where the tokenizer does not, or the other way round; try that once.
            if written_otherwise or self.tokenizer.bos_token_id is None:
                raise RopewalkError(
                    f"the server at {self.address} counts {read} tokens for {TRIAL!r}, but the local tokenizer counts "
                    f"{len(ids)}; give the tokenizer of the served model as MODEL"
                )
            written_otherwise, self._bos_added = True, not self._bos_added

    def _do_without(self, refusal: RefusalError, listed: list[str] | None) -> None:
        """Omit the fields that a rejection of the trial request names, or raise if none of them is optional."""
        named = [name for name in refusal.named if name in self._own]
        # OpenAI rejects a field with 400, FastAPI with 422.
        if refusal.status in (400, 422) and named:
            for name in named:
                del self._own[name]
            # A field that only asks for greedy decoding may be dropped: temperature 0 already does.
            self._left_out += named
            if named == [*GREEDY]:
                self._own |= {name: v for name, v in OPENAI_GREEDY.items() if name not in self.extra}
            self._note_penalty()
            return
        # Servers that take only text refuse a list of ids with a schema error that names the prompt.
        ids_refused = refusal.status in (400, 422) and "prompt" in str(refusal) and not self.as_turns
        if ids_refused and self._auto and not self._text_sent and self.tokenizer is not None:
            self._text_sent = True
            self.notes.append(
                "The server rejects token ids, so prompts are sent as text. The local tokenizer checks that each text "
                "encodes to the tokens of its prompt."
            )
            return
        raise RopewalkError(self._refused(refusal, listed)) from refusal

    def _note_penalty(self) -> None:
        sent = ", ".join(f"{name} {value:g}" for name, value in self._own.items())
        instead = (
            f". {sent} is sent instead, which switches the penalty off in transformers serve" if sent else ""
        )
        note = (
            f"The server rejects {' and '.join(self._left_out)}, so a penalty in the generation_config.json of the "
            f"served checkpoint may change answers{instead}."
        )
        # Each further rejection names more fields, so its note replaces the one before.
        self.notes[:] = [each for each in self.notes if "generation_config" not in each] + [note]

    def _refused(self, refusal: RefusalError, listed: list[str] | None) -> str:
        """Return the error message for a rejected trial request."""
        reason = f"the server at {self.address} rejects a request for one token ({refusal})"
        given = [name for name in refusal.named if name in self.extra]
        needed = [name for name in refusal.named if name in RESERVED]
        if refusal.status is None:
            return f"the server at {self.address} cannot be used: {refusal}"
        if refusal.status == 404:
            if listed is None:
                return f"{reason}; an OpenAI-compatible address usually ends in /v1"
            return f"the server at {self.address} does not serve {self.model}; it serves {_names(listed)} ({refusal})"
        if given:
            return f"{reason}; remove {' and '.join(given)} from --server-extra"
        if not self._text_sent and set(needed) <= {"prompt"} and "prompt" in str(refusal):
            needs = "" if self.tokenizer is not None else ", which needs the tokenizer"
            return f"{reason}; if it rejects token ids, give --send text{needs}"
        if needed:
            return f"{reason}; answers depend on {' and '.join(needed)}, so the model cannot be measured on this server"
        return reason

    def _trial(self) -> tuple[int, ...]:
        """Return the trial prompt as token ids; without a tokenizer, the id 0, which every vocabulary has."""
        if self.tokenizer is None:
            return (0,)
        ids = self.tokenizer(TRIAL, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return tuple(ids if bos is None else [bos, *ids])

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """Yield one answer per request as soon as it arrives, with at most ``concurrency`` concurrent requests.

        Raises:
            RopewalkError: by the call itself, if a prompt is empty, ``max_new_tokens`` is less than 1, or
                :meth:`check` fails.
            RunFailure: if the server rejects a prompt, or stops responding. Answers to pending requests are yielded
                first.
        """
        check_requests(requests)
        if requests and not self._checked:
            self.check()
        return _answers([self], requests)

    def completion(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        return self._complete(request, self._completion_with_retries(client, request, stop))

    def _completion_with_retries(
        self, client: Any, request: GenerationRequest, stop: threading.Event
    ) -> Completion:
        """Return the server's completion of a prompt, with retries after temporary faults."""
        attempt, limited, backoff = 0, 0.0, min(self.backoff, LONGEST_BACKOFF)
        while True:
            try:
                body = self._request(client, request)
                return read_chat(body) if self.as_turns else read_completion(body)
            except FaultError as error:
                fault = error
            # A server that asks for a pause knows better than our own backoff; 0, or a date that has passed by its
            # clock, asks for none. Random, so that requests that were rejected together do not come back together.
            wait = fault.wait or backoff * random.uniform(1, 1.5)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            # A server at its rate limit works: waiting for it is no failed attempt, within the time-out. Without a
            # wait, requests would follow each other for ever.
            if fault.status == TOO_MANY and wait > 0 and limited + wait <= self.timeout:
                limited += wait
            elif attempt == self.retries:
                break
            else:
                attempt += 1
            # Unlike sleep, this wait ends as soon as another thread fails.
            if stop.wait(wait):
                break
        raise fault

    def _complete(self, request: GenerationRequest, completion: Completion) -> Completion:
        """Check that the server neither truncated the prompt nor ran out of context for the answer.

        Raises:
            RefusalError: if the token counts that the server reports show either.
        """
        # A server that applies its own template may write fewer tokens around the same texts.
        sent = request.content_tokens if self.as_turns else len(request.input_ids)
        read = completion.prompt_tokens
        # Some servers report 0 for unknown. A different tokenizer would have failed the trial in :meth:`_agree`.
        if read and read < sent:
            raise RefusalError(
                f"it read only {read} of the {sent} tokens of a prompt; serve the model with a longer context"
            )
        # Ended by length before max_tokens: only the end of the server's context remains as the reason.
        if (
            completion.finished is False
            and completion.new_tokens is not None
            and completion.new_tokens < request.max_new_tokens
        ):
            raise RefusalError(
                f"it ran out of context after {completion.new_tokens} of {request.max_new_tokens} tokens of an answer; "
                "serve the model with a longer context"
            )
        return completion

    def _request(self, client: Any, request: GenerationRequest) -> bytes:
        if self.as_turns:
            messages = [{"role": role, "content": text} for role, text in request.turns]
            return self._content(
                client.chat.completions.with_raw_response.create,
                model=self.model,
                messages=messages,
                max_tokens=request.max_new_tokens,
                temperature=0.0,
                extra_body={**self._own, **self.extra},
            )
        prompt = self._text(request.input_ids) if self._text_sent else list(request.input_ids)
        return self._content(
            client.completions.with_raw_response.create,
            model=self.model,
            # The client inspects each element of `prompt`, a second for 128K ids, so the ids go into extra_body.
            prompt="",
            max_tokens=request.max_new_tokens,
            temperature=0.0,
            extra_body={**self._own, **self.extra, "prompt": prompt},
        )

    def _content(self, call: Any, **arguments: Any) -> bytes:
        """Return the body of a response, or raise FaultError or RefusalError."""
        try:
            content: bytes = call(**arguments).content
        except self._openai.APITimeoutError as error:
            raise FaultError(f"no response within {self.timeout:g} s") from error
        except self._openai.APIConnectionError as error:
            # The client's own message is only "Connection error."; the cause says what happened.
            raise FaultError(self._hidden(str(error.__cause__ or error)) or "connection lost") from error
        except self._openai.APIStatusError as error:
            status = error.status_code
            message = f"HTTP {status}: {self._hidden(server_message(error.body, status))}"
            # Time-outs, rate limits and faults of the server may pass; any other status would come again.
            if status in (408, 429) or status >= 500:
                wait = retry_after(error.response.headers.get("retry-after"))
                raise FaultError(message, wait, status) from error
            named = named_fields(error.body, (*RESERVED, *self._own, *self.extra))
            raise RefusalError(message, status, named) from error
        return content

    def _hidden(self, text: str) -> str:
        # A server's message may quote the request together with its key.
        return text.replace(self._api_key, "***") if self._api_key != NO_KEY else text

    def _text(self, input_ids: Sequence[int]) -> str:
        """Return a text that the local tokenizer encodes as these ids; the server's should do the same.

        Raises:
            RefusalError: if the local tokenizer encodes the text differently.
        """
        bos = self.tokenizer.bos_token_id
        # Where the server's tokenizer adds BOS itself, the text must not bring another one.
        ids = list(input_ids[1:] if self._bos_added and input_ids[0] == bos else input_ids)
        # Calls change the tokenizer's truncation and padding state, which all threads share.
        with self._tokenizer_lock:
            text: str = self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            read = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)[
                "input_ids"
            ]
        if [*([bos] if self._bos_added else []), *read] != list(input_ids):
            raise RefusalError(
                f"a prompt of {len(input_ids)} tokens cannot be sent as text, because its text encodes to other tokens "
                f"({len(read) + self._bos_added} of them); use a server that accepts token ids"
            )
        return text

    def failed(self, failure: Exception | None, answered: int, total: int) -> RunFailure:
        after = f"after {answered} of {total} answers"
        if isinstance(failure, RefusalError):
            return RunFailure(f"the server at {self.address} rejected a prompt {after} ({failure})")
        reason = failure.reason if isinstance(failure, FaultError) else "an unexpected error, shown above"
        return RunFailure(
            f"the server at {self.address} stopped responding ({reason}) {after}; run the same command again to resume"
        )

    def _only(self, listed: list[str]) -> str:
        if len(listed) != 1:
            raise RopewalkError(
                f"the server at {self.address} serves {_names(listed)}; name one model with --server-model"
            )
        return listed[0]

    def client(self) -> Any:
        """A client of the server, to be closed by the caller."""
        return self._client(self.timeout)

    def _client(self, timeout: float) -> Any:
        return self._openai.OpenAI(
            base_url=self._base_url,
            api_key=self._api_key,
            # A server that is off should show within seconds, although an answer may take minutes.
            timeout=self._openai.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
            # Our own retries also cover unreadable responses, and stop when another request has failed.
            max_retries=0,
        )


class ServerPool:
    """Several servers of one model, which share the prompts: each takes the next one when it has room.

    If a server stops responding, the others answer its prompts.

    Args:
        backends: one backend for each server; at least one.
        report: called with a sentence on each server that is lost.
    """

    def __init__(
        self, backends: Sequence[ServerBackend], report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.backends, self.report = list(backends), report
        self._checked = False

    @property
    def as_turns(self) -> bool:
        """Whether the servers get turns and apply the chat template themselves."""
        return self.backends[0].as_turns

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the answers, each once; complete after :meth:`check`."""
        return [*dict.fromkeys(note for each in self.backends for note in each.notes)]

    @property
    def description(self) -> dict[str, Any]:
        """That of the servers, which is the same but for the address; complete after :meth:`check`."""
        addresses = [each.address for each in self.backends]
        more = {"addresses": addresses} if len(addresses) > 1 else {}
        return self.backends[0].description | more

    def check(self) -> str:
        """Check every server, and that all serve the same model and accept the same requests.

        Returns:
            The name of the model.

        Raises:
            RopewalkError: as :meth:`ServerBackend.check`; or if two servers differ.
        """
        first, *others = self.backends
        name = first.check()
        for other in others:
            other.check()
            ours, theirs = (
                {key: value for key, value in each.description.items() if key != "address"}
                for each in (first, other)
            )
            if ours != theirs:
                raise RopewalkError(
                    f"the servers at {first.address} and {other.address} differ ({ours} and {theirs}), so their "
                    "answers cannot be counted together; give servers of one model and one program"
                )
        self._checked = True
        return name

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """Yield one answer per request as soon as it arrives; see :meth:`ServerBackend.answers`.

        Raises:
            RopewalkError: as :meth:`ServerBackend.answers`.
            RunFailure: if a server rejects a prompt, or all have stopped responding.
        """
        check_requests(requests)
        if requests and not self._checked:
            self.check()
        return _answers(self.backends, requests, self.report)


def server_pool(
    serving: Serving, tokenizer: Any = None, report: Callable[[str], None] = lambda text: None
) -> ServerPool:
    """The servers at the addresses of the settings.

    Raises:
        RopewalkError: as :class:`ServerBackend`; or if an address is given twice.
    """
    urls = [each.strip() for each in serving.url.split(",")]
    backends = [ServerBackend(serving.model_copy(update={"url": url}), tokenizer) for url in urls]
    addresses = [each.address for each in backends]
    twice = next((each for each in addresses if addresses.count(each) > 1), None)
    if twice is not None:
        raise RopewalkError(f"the server address {twice} is given twice; give each server once")
    return ServerPool(backends, report)


def check_requests(requests: Sequence[GenerationRequest]) -> None:
    """Raise for a request without a prompt or without room for an answer."""
    for index, request in enumerate(requests):
        if not request.input_ids or request.max_new_tokens < 1:
            raise RopewalkError(
                f"request {index} has {len(request.input_ids)} prompt tokens and max_new_tokens "
                f"{request.max_new_tokens}; both must be 1 or more"
            )


@dataclass(frozen=True, eq=False)
class _Worker:
    """What the threads of one server share.

    Attributes:
        backend: the server.
        client: its client.
        stop: set when the server is lost, or when nothing is left to do.
    """

    backend: ServerBackend
    client: Any
    stop: threading.Event

    def work(
        self,
        requests: Sequence[GenerationRequest],
        todo: SimpleQueue[int | None],
        outcomes: SimpleQueue[Answer | tuple[_Worker, Exception] | None],
    ) -> None:
        """Process requests until there is a None among them, or the server is lost."""
        try:
            while not self.stop.is_set() and (index := todo.get()) is not None:
                try:
                    found = self.backend.completion(self.client, requests[index], self.stop)
                except Exception as error:
                    # Another server may answer it.
                    todo.put(index)
                    self.stop.set()
                    outcomes.put((self, error))
                    if not isinstance(error, (FaultError, RefusalError)):
                        raise
                    return
                outcomes.put(Answer(index, found.text, found.new_tokens, found.finished))
        finally:
            # None tells the consumer that this thread has ended.
            outcomes.put(None)


def _answers(
    backends: Sequence[ServerBackend],
    requests: Sequence[GenerationRequest],
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Answer]:
    todo: SimpleQueue[int | None] = SimpleQueue()
    for index in range(len(requests)):
        todo.put(index)
    outcomes: SimpleQueue[Answer | tuple[_Worker, Exception] | None] = SimpleQueue()
    workers = [_Worker(each, each.client(), threading.Event()) for each in backends]
    # Daemon threads, so that interrupting a run does not wait for answers that nobody will read.
    threads = [
        threading.Thread(target=worker.work, args=(requests, todo, outcomes), daemon=True)
        for worker in workers
        for _ in range(min(worker.backend.concurrency, len(requests)))
    ]

    def finish() -> None:
        for worker in workers:
            worker.stop.set()
        # A thread that waits for a request gets none.
        for _ in threads:
            todo.put(None)

    for thread in threads:
        thread.start()
    working, answered = len(threads), 0
    failure: tuple[ServerBackend, Exception | None] = (backends[0], None)
    lost: set[_Worker] = set()
    try:
        while working:
            outcome = outcomes.get()
            if outcome is None:
                working -= 1
            elif isinstance(outcome, Answer):
                answered += 1
                yield outcome
                if answered == len(requests):
                    finish()
            else:
                worker, error = outcome
                if worker in lost:
                    # Threads of one server fail together, so the first reason is enough.
                    continue
                lost.add(worker)
                if failure[1] is None:
                    failure = (worker.backend, error)
                if not isinstance(error, FaultError) or len(lost) == len(workers):
                    finish()
                else:
                    report(
                        f"the server at {worker.backend.address} stopped responding ({error.reason}); "
                        f"{len(workers) - len(lost)} of {len(workers)} servers go on"
                    )
    finally:
        # Also if the caller closes this generator early: each thread then ends after its current request.
        finish()
    # Join, so that the traceback of an unexpected error is printed before our own message.
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.client.close()
    if answered < len(requests):
        backend, reason = failure
        raise backend.failed(reason, answered, len(requests)) from reason


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise for additional request fields that cannot be sent.

    Raises:
        RopewalkError: for an invalid name, a field that ropewalk sets itself or that changes the response format, or a
            value that is not JSON.
    """
    for name, value in extra.items():
        if not name.isidentifier():
            raise RopewalkError(f"{name!r} is not a valid name of a request field; write it like top_k")
        if name in RESERVED or name in UNREADABLE:
            raise RopewalkError(
                f"the request field {name} cannot be changed, because ropewalk sets it; remove it"
            )
        try:
            # By default, json.dumps writes NaN, which is not JSON.
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RopewalkError(f"the request field {name} must be a JSON value, got {value!r}") from error


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer adds BOS to a text."""
    read = tokenizer(TRIAL, verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and read[:1] == [tokenizer.bos_token_id]


def _names(models: Sequence[str]) -> str:
    names = one_line(", ".join(models[:SHOWN_MODELS]))
    more = len(models) - SHOWN_MODELS
    return f"{names} and {more} more" if more > 0 else names or "nothing"


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise RopewalkError(
            "--server needs the openai package, which is not installed; run pip install 'ropewalk[server]'"
        ) from error
    return openai


def _key(given: str | None) -> str:
    source = "api_key" if given is not None else KEY_VARIABLE
    key = (given if given is not None else os.environ.get(KEY_VARIABLE, "")).strip()
    if not key.isascii() or not key.isprintable():
        raise RopewalkError(f"the API key in {source} has characters that are not allowed in an HTTP header")
    return key or NO_KEY


LONGEST_REMARK = 300
"""Maximum number of characters of a server's message that an error message quotes."""

LONGEST_WAIT = 60.0
"""Maximum seconds to wait for a server's Retry-After header."""

# Any other reason leaves open how the answer ended.
_FINISHED = {"stop": True, "length": False}
# Answers that the server gave up, such as vLLM's after an abort.
_BROKEN_OFF = ("abort", "error")


class FaultError(Exception):
    """An attempt failed temporarily; a retry may succeed.

    Attributes:
        reason: the reason, on one line.
        wait: seconds that the server asks to wait, or None.
        status: HTTP status; None if there was no response, or an unreadable one.
    """

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait, self.status = reason, wait, status


@dataclass(frozen=True)
class Completion:
    """A server's completion of a prompt; the fields have the meaning of those of :class:`Answer`."""

    text: str
    new_tokens: int | None
    finished: bool | None
    prompt_tokens: int | None = None


def read_completion(body: bytes) -> Completion:
    """Read the first choice in a response of ``/completions``.

    Raises:
        FaultError: if the response is not JSON, has no choice with a text, or was aborted by the server.
    """
    value = _json(body)
    match value:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            pass
        case _:
            raise FaultError(f"a response without a text: {one_line(body)}")
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise FaultError(f"the server aborted an answer ({reason})")
    usage = value.get("usage")
    tokens = _whole(usage, "completion_tokens")
    return Completion(
        _whole_characters(text),
        tokens,
        _FINISHED.get(reason) if isinstance(reason, str) else None,
        _whole(usage, "prompt_tokens"),
    )


def read_chat(body: bytes) -> Completion:
    """Read the first choice in a response of ``/chat/completions``.

    Thoughts that the server has split off are put back between their marks, so that all answers are read alike.

    Raises:
        FaultError: as for :func:`read_completion`.
    """
    value = _json(body)
    match value:
        case {"choices": [{"message": dict(message)}, *_]}:
            pass
        case _:
            raise FaultError(f"a response without a message: {one_line(body)}")
    content = message.get("content")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(content, str | None) or not isinstance(thoughts, str | None):
        raise FaultError(f"a response without a text: {one_line(body)}")
    if content is None and thoughts is None:
        raise FaultError(f"a response without a text: {one_line(body)}")
    text = content or ""
    if thoughts:
        text = f"{THOUGHTS}{thoughts}{END_OF_THOUGHTS if text else ''}{text}"
    return read_completion(json.dumps({**value, "choices": [{**value["choices"][0], "text": text}]}).encode())


def _whole(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    # Not isinstance, because True is an int too.
    return value if type(value) is int else None


def read_models(body: bytes) -> list[str]:
    """Read the names of the models in a response of ``/models``.

    Raises:
        FaultError: if the response is not a list of models.
    """
    match _json(body):
        case {"data": list(entries)}:
            names = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
            if all(isinstance(name, str) for name in names):
                return [str(name) for name in names]
    raise FaultError(f"the response is not a list of models: {one_line(body)}")


def server_message(body: object, status: int) -> str:
    """Return a server's message about a rejected request, on one line.

    Args:
        body: the JSON value under ``error``, or the whole response, depending on the server.
        status: HTTP status, used if there is no message.
    """
    if isinstance(body, Mapping):
        message = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    else:
        message = body
    return one_line(
        message if isinstance(message, str) else json.dumps(message, default=str) if message else ""
    ) or (f"status {status} without a message")


def named_fields(body: object, fields: Collection[str]) -> tuple[str, ...]:
    """Find the request fields that a server's rejection names.

    FastAPI lists errors with their location in the request, OpenAI sends a ``param``, and older vLLM writes FastAPI's
    list into the message. If a location is given, only locations count, because the message may quote the whole
    request. Otherwise a field counts if its name occurs as a word in the message; ``model`` and ``prompt``, which are
    ordinary words too, count only in quotes.

    Args:
        body: the JSON value under ``error``, or the whole response.
        fields: names of the fields that were sent.

    Returns:
        The named fields in the order of ``fields``; empty if the rejection has another reason.

    Example:
        >>> named_fields({"detail": "Unexpected fields in the request: {'best_of'}"}, ["prompt", "best_of"])
        ('best_of',)
    """
    value = body if isinstance(body, Mapping) else {}
    messages = [value.get(key) for key in ("message", "detail", "error")] if value else [body]
    words = "\n".join(
        each if isinstance(each, str) else json.dumps(each, default=str) for each in messages if each
    )
    # A server may quote a prompt of a million tokens, and the searches below must stay quick.
    words = words[:_MOST_WORDS]
    # Where the error says which field it means, other fields that its text merely mentions are not blamed.
    places = set(_PLACE.findall(words))
    # FastAPI's list of errors, each with its location.
    for errors in messages:
        for error in errors if isinstance(errors, list) else ():
            place = error.get("loc") if isinstance(error, Mapping) else None
            places |= {each for each in place if isinstance(each, str)} if isinstance(place, list) else set()
    # OpenAI names a single field here.
    if not places and value.get("param") in fields:
        places = {value["param"]}
    return tuple(
        name for name in fields if (name in places if places else re.search(_word(name), words) is not None)
    )


_MOST_WORDS = 100_000
_PLACE = re.compile(r"'loc': \('body', '(\w+)'")


def _word(name: str) -> str:
    quoted = rf"""["'`]{re.escape(name)}["'`]"""
    return quoted if name in ("model", "prompt") else rf"(?<![\w-]){re.escape(name)}(?![\w-])"


def one_line(message: str | bytes) -> str:
    """Make foreign text fit for an error message: one line, without control characters, and short."""
    # A character has at most four bytes, so the rest of a megabyte of HTML need not be decoded.
    text = message[: 4 * LONGEST_REMARK].decode("utf-8", "replace") if isinstance(message, bytes) else message
    text = text[: 4 * LONGEST_REMARK]
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= LONGEST_REMARK else line[: LONGEST_REMARK - 1] + "…"


def retry_after(header: str | None) -> float | None:
    """Return the seconds in a Retry-After header, a number or a date, at most a minute; None if it is neither."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
        return min(float(header), LONGEST_WAIT)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    # A date without a zone is one of HTTP's older forms, which mean UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - datetime.now(UTC)).total_seconds(), 0.0), LONGEST_WAIT)


def public_address(base_url: str) -> str:
    """Return a server's address without user and password, for the record.

    Raises:
        RopewalkError: if it is not the address of an HTTP server, or has a query or fragment.
    """
    try:
        parts = urlsplit(base_url)
        # Invalid host names (no IDNA form), ports and brackets all raise ValueError here.
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
        good = named and parts.scheme in ("http", "https") and base_url.isprintable() and " " not in base_url
    except ValueError:
        good = False
    if not good:
        # Do not print the part before an @: it may contain a password.
        shown = base_url.rpartition("@")[2]
        raise RopewalkError(f"{shown!r} is not a server address; write it like http://localhost:8000/v1")
    # Without a final slash, so that one server has one name.
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    if parts.query or parts.fragment:
        raise RopewalkError(
            f"the server address {address} has a query or fragment; remove everything from ? or # on"
        )
    return address


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise FaultError(f"the response is not JSON: {one_line(body) or 'it is empty'}") from None


def _whole_characters(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates: JSON may contain them, but files cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
