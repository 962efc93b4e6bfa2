"""A server with an OpenAI-compatible completion endpoint answers prompts.

vLLM, SGLang, llama.cpp's server and ``transformers serve`` all have one, and differ in what they take: some refuse
fields that OpenAI does not define, some refuse token ids. One request of one token finds that out before the first
prompt is asked, and what it found stands in the backend's description and notes.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, Send
from ropewalk.io.settings import Option, Settings, pairs

KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
"""Sent where there is no key: the client insists on one, and servers of one's own do not ask."""

LONGEST_BACKOFF = 8.0
"""Seconds between two attempts, unless the server asks for more."""

CONNECT_TIMEOUT = 10.0
CHECK_TIMEOUT = 30.0
"""Seconds for finding a server, and for its list of models."""

GREEDY: Mapping[str, Any] = {"repetition_penalty": 1.0}
"""vLLM takes settings that a request leaves open from the checkpoint's generation_config.json; penalties apply
at temperature 0 as well."""

OPENAI_GREEDY: Mapping[str, Any] = {"frequency_penalty": 0.0}
"""In place of ``GREEDY`` where it is refused: ``transformers serve`` makes this field, less 1, the repetition
penalty."""

RESERVED = ("model", "prompt", "max_tokens", "temperature")
"""Fields of every request, without which an answer would be another."""

UNREADABLE = ("stream", "n", "best_of", "echo", "suffix")
"""Fields that change the form of an answer, so that it could not be read as the answer to a prompt."""

TRIAL = "The grass is green."
"""What the request of one token asks."""

SHOWN_MODELS = 5


class RefusalError(Exception):
    """The server will not answer, however often it is asked.

    Attributes:
        status: of HTTP; None where an answer came that is none.
        named: fields of the request that the server's words name.
    """

    def __init__(self, reason: str, status: int | None = None, named: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.named = status, named


def _json_values(value: Any) -> Any:
    """Values of a request's further fields, each read as JSON where it was typed."""
    if isinstance(value, Mapping):
        check_extra(value)
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for name, text in pairs(value, example="top_k=1").items():
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{name}={text}: {text!r} is no JSON value; write a text as {name}='{json.dumps(text)}'"
            ) from None
    check_extra(found)
    return found


class Serving(Settings):
    """Where a model is served and how it is asked.

    Attributes:
        url: the server's address with its path.
        model: the name under which it serves the model; None takes the only one.
        concurrency: most requests at once.
        timeout: seconds without a word from the server after which an attempt has failed.
        retries: further attempts a prompt after a lost connection, a timeout, HTTP 408, 429 or 5xx, or an answer that
            is none.
        send: ``ids`` sends the prompt's token ids, with our BOS and nothing else. ``text``, for servers that take no
            ids, sends a text that the tokenizer reads as these ids: without BOS where it puts one in front by itself,
            else with BOS written out. ``auto`` sends ids, or text where the server refuses ids.
        extra: further fields of every request, JSON values.
    """

    group: ClassVar[str | None] = "Server"

    url: Annotated[str, Option(name="--server", metavar="URL")] = Field(
        description="Ask this OpenAI-compatible server: http://localhost:8000/v1. The key is read from OPENAI_API_KEY."
    )
    model: Annotated[str | None, Option(name="--server-model")] = Field(
        None, description="Name of the model there; its only one if not given."
    )
    concurrency: int = Field(8, ge=1, description="Requests at once.")
    timeout: float = Field(600.0, gt=0, description="Seconds that an answer may take.")
    retries: int = Field(4, ge=0, description="Times that a failed request is repeated.")
    send: Send = Field(
        "auto",
        description="ids: token ids, exactly as counted; text: for servers that take text alone; auto: ids, or text "
        "where the server refuses ids.",
    )
    extra: Annotated[
        dict[str, Any],
        BeforeValidator(_json_values),
        Option(name="--server-extra", metavar="KEY=VALUE", repeated=True),
    ] = Field(
        {}, description="Send this field with every request, its value as JSON: top_k=1; may be repeated."
    )


class ServerBackend:
    """Greedy answers of a server.

    Args:
        serving: where the model is served and how it is asked. Fields of ``extra`` are never left out, and go before
            ``GREEDY``.
        tokenizer: the model's own; needed to send text. The server's is taken to be the same.
        api_key: for servers that ask for one; ``OPENAI_API_KEY`` of the environment if None. It is shown
            nowhere.
        backoff: seconds before the second attempt, twice as many before each one after it, up to 8.

    Raises:
        RopewalkError: if the openai package is missing, or an argument is not what it should be.
    """

    def __init__(
        self, serving: Serving, tokenizer: Any = None, api_key: str | None = None, backoff: float = 0.5
    ) -> None:
        if not 0 <= backoff < math.inf:
            raise RopewalkError(f"backoff is seconds, got {backoff}")
        if serving.send == "text" and tokenizer is None:
            raise RopewalkError("sending text needs the tokenizer; give it, or send ids")
        self._openai = _openai()
        self.address = public_address(serving.url)
        self.model = serving.model
        self.tokenizer = tokenizer
        self.concurrency, self.timeout, self.retries = serving.concurrency, serving.timeout, serving.retries
        self.backoff = backoff
        self.extra = serving.extra
        self.notes: list[str] = []
        """What is to be known of the answers, in sentences; complete after :meth:`check`."""
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
        """Kind, address, model where it is known, and what is sent; complete after :meth:`check`."""
        return {
            "kind": "server",
            "address": self.address,
            **({} if self.model is None else {"model": self.model}),
            "prompts": "text" if self._text_sent else "ids",
            **({"extra": self.extra} if self.extra else {}),
            **({"left_out": self._left_out} if self._left_out else {}),
        }

    def check(self) -> str:
        """Find the model, and with one token of its own what the server takes.

        Fields of ``GREEDY`` that the server refuses are left out, and ids give way to text under ``auto``; the notes
        say so. A server need not list a model that was named: ``transformers serve`` lists the hub's cache.

        Returns:
            The name of the model that will be asked.

        Raises:
            RopewalkError: if the server cannot be reached, does not serve the model, or refuses what an answer
                depends on.
        """
        listed: list[str] | None = None
        with self._client(min(self.timeout, CHECK_TIMEOUT)) as client:
            try:
                listed = read_models(self._content(client.models.with_raw_response.list))
            except FaultError as fault:
                if self.model is None or fault.status is None:
                    raise RopewalkError(
                        f"no model server answers at {self.address} ({fault.reason}); start it, or give another "
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
        """Ask for one token, with less and less that can be done without, until the server takes the request."""
        written_otherwise = False
        while True:
            ids = self._trial()
            try:
                read = self._said(
                    client, GenerationRequest(ids, 1, len(ids) + 1), threading.Event()
                ).prompt_tokens
            except FaultError as fault:
                raise RopewalkError(
                    f"the server at {self.address} does not answer ({fault.reason}); start it anew, or give another "
                    "address"
                ) from fault
            except RefusalError as refusal:
                self._do_without(refusal, listed)
                continue
            if not self._text_sent or not read or read == len(ids):
                return
            # It puts BOS in front where the tokenizer does not, or the other way round.
            if written_otherwise or self.tokenizer.bos_token_id is None:
                raise RopewalkError(
                    f"the server at {self.address} reads {read} tokens where the tokenizer at hand has {len(ids)} for "
                    f"{TRIAL!r}: it serves a model with another tokenizer"
                )
            written_otherwise, self._bos_added = True, not self._bos_added

    def _do_without(self, refusal: RefusalError, listed: list[str] | None) -> None:
        """Leave out what a refusal of the trial request names, or raise where it names nothing that can go."""
        named = [name for name in refusal.named if name in self._own]
        if refusal.status in (400, 422) and named:
            for name in named:
                del self._own[name]
            self._left_out += named
            if named == [*GREEDY]:
                self._own |= {name: v for name, v in OPENAI_GREEDY.items() if name not in self.extra}
            self._note_penalty()
            return
        ids_refused = refusal.status in (400, 422) and "prompt" in str(refusal)
        if ids_refused and self._auto and not self._text_sent and self.tokenizer is not None:
            self._text_sent = True
            self.notes.append(
                "The server takes no token ids, so prompts are sent as text; each is checked to be read as its own "
                "tokens by the tokenizer at hand."
            )
            return
        raise RopewalkError(self._refused(refusal, listed)) from refusal

    def _note_penalty(self) -> None:
        sent = ", ".join(f"{name} {value:g}" for name, value in self._own.items())
        instead = (
            f"; {sent} is sent in its place, which switches it off in transformers serve" if sent else ""
        )
        note = (
            f"The server refuses {' and '.join(self._left_out)}, so that a penalty in the generation_config.json of "
            f"the checkpoint that it serves may change answers{instead}."
        )
        self.notes[:] = [each for each in self.notes if "generation_config" not in each] + [note]

    def _refused(self, refusal: RefusalError, listed: list[str] | None) -> str:
        """Why nothing can be measured here, in one sentence."""
        said = f"the server at {self.address} refuses a request of one token ({refusal})"
        given = [name for name in refusal.named if name in self.extra]
        needed = [name for name in refusal.named if name in RESERVED]
        if refusal.status is None:
            return f"the server at {self.address} cannot be asked: {refusal}"
        if refusal.status == 404:
            if listed is None:
                return f"{said}; an OpenAI-compatible address usually ends in /v1"
            return f"the server at {self.address} does not serve {self.model}; it serves {_names(listed)} ({refusal})"
        if given:
            return f"{said}: leave {' and '.join(given)} out of --server-extra"
        if not self._text_sent and set(needed) <= {"prompt"} and "prompt" in str(refusal):
            needs = "" if self.tokenizer is not None else ", which needs the tokenizer"
            return f"{said}; if it takes no token ids, send text{needs}"
        if needed:
            return f"{said}: without {' and '.join(needed)} answers would be others, so the model cannot be measured"
        return said

    def _trial(self) -> tuple[int, ...]:
        """Prompt of the trial request as token ids; one id that every vocabulary has where there is no tokenizer."""
        if self.tokenizer is None:
            return (0,)
        ids = self.tokenizer(TRIAL, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return tuple(ids if bos is None else [bos, *ids])

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """One answer a request, each as soon as it is there; ``concurrency`` requests are under way at most.

        Raises:
            RopewalkError: at once, if a prompt is empty or leaves no room, or :meth:`check` fails.
            RunFailure: if the server refuses a prompt, or stops answering; what else was under way is waited
                for and yielded first.
        """
        for index, request in enumerate(requests):
            if not request.input_ids or request.max_new_tokens < 1:
                raise RopewalkError(
                    f"request {index} has {len(request.input_ids)} prompt tokens and max_new_tokens "
                    f"{request.max_new_tokens}; both must be 1 or more"
                )
        if requests and not self._checked:
            self.check()
        return self._answers(requests)

    def _answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        todo: SimpleQueue[int] = SimpleQueue()
        for index in range(len(requests)):
            todo.put(index)
        outcomes: SimpleQueue[Answer | Exception | None] = SimpleQueue()
        stop = threading.Event()
        client = self._client(self.timeout)
        # Daemons: whoever interrupts a run does not wait for answers that nobody will read.
        threads = [
            threading.Thread(target=self._work, args=(client, requests, todo, outcomes, stop), daemon=True)
            for _ in range(min(self.concurrency, len(requests)))
        ]
        for thread in threads:
            thread.start()
        working, answered, failure = len(threads), 0, None
        try:
            while working:
                outcome = outcomes.get()
                if outcome is None:
                    working -= 1
                elif isinstance(outcome, Answer):
                    answered += 1
                    yield outcome
                else:
                    failure = failure or outcome
        finally:
            stop.set()
        # Their last word is out; what nobody thought of is printed after it, and before our own message.
        for thread in threads:
            thread.join()
        client.close()
        if answered < len(requests):
            raise self._failed(failure, answered, len(requests)) from failure

    def _work(
        self,
        client: Any,
        requests: Sequence[GenerationRequest],
        todo: SimpleQueue[int],
        outcomes: SimpleQueue[Answer | Exception | None],
        stop: threading.Event,
    ) -> None:
        """Answer what is to do, until there is nothing left or somebody has failed."""
        try:
            while not stop.is_set():
                index = todo.get_nowait()
                said = self._completion(client, requests[index], stop)
                outcomes.put(Answer(index, said.text, said.new_tokens, said.finished))
        except Empty:
            pass
        except (FaultError, RefusalError) as error:
            stop.set()
            outcomes.put(error)
        finally:
            outcomes.put(None)

    def _completion(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        return self._complete(request, self._said(client, request, stop))

    def _said(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        """What the server says to a prompt; faults are repeated."""
        for attempt in range(self.retries + 1):
            try:
                return read_completion(self._asked(client, request))
            except FaultError as error:
                fault = error
            wait = min(self.backoff * 2**attempt, LONGEST_BACKOFF) if fault.wait is None else fault.wait
            if attempt == self.retries or stop.wait(wait):
                break
        raise fault

    def _complete(self, request: GenerationRequest, said: Completion) -> Completion:
        """A prompt that was cut, or an answer that found no room, is no answer of the model's.

        Raises:
            RefusalError: if the server says so.
        """
        asked, read = len(request.input_ids), said.prompt_tokens
        # Zero is no count; of text that is read in other tokens than ours, :meth:`_agree` has seen an example.
        if read and read < asked:
            raise RefusalError(
                f"it read {read} of a prompt's {asked} tokens: serve the model with a longer context"
            )
        if (
            said.finished is False
            and said.new_tokens is not None
            and said.new_tokens < request.max_new_tokens
        ):
            raise RefusalError(
                f"it ended an answer after {said.new_tokens} of {request.max_new_tokens} tokens for want of room: "
                "serve the model with a longer context"
            )
        return said

    def _asked(self, client: Any, request: GenerationRequest) -> bytes:
        prompt = self._text(request.input_ids) if self._text_sent else list(request.input_ids)
        return self._content(
            client.completions.with_raw_response.create,
            model=self.model,
            # The client looks at each element of a prompt, a second for 128K ids; an extra field it leaves alone.
            prompt="",
            max_tokens=request.max_new_tokens,
            temperature=0.0,
            extra_body={**self._own, **self.extra, "prompt": prompt},
        )

    def _content(self, call: Any, **arguments: Any) -> bytes:
        """The body of an answer; what went wrong as one of our two kinds."""
        try:
            content: bytes = call(**arguments).content
        except self._openai.APITimeoutError as error:
            raise FaultError(f"no word within {self.timeout:g} s") from error
        except self._openai.APIConnectionError as error:
            raise FaultError(self._hidden(str(error.__cause__ or error)) or "connection lost") from error
        except self._openai.APIStatusError as error:
            status = error.status_code
            message = f"HTTP {status}: {self._hidden(server_message(error.body, status))}"
            if status in (408, 429) or status >= 500:
                wait = retry_after(error.response.headers.get("retry-after"))
                raise FaultError(message, wait, status) from error
            named = named_fields(error.body, (*RESERVED, *self._own, *self.extra))
            raise RefusalError(message, status, named) from error
        return content

    def _hidden(self, said: str) -> str:
        return said.replace(self._api_key, "***") if self._api_key != NO_KEY else said

    def _text(self, input_ids: Sequence[int]) -> str:
        """A text that the server's tokenizer reads as these ids, as far as can be known here.

        Raises:
            RefusalError: if the tokenizer at hand reads other ids.
        """
        bos = self.tokenizer.bos_token_id
        ids = list(input_ids[1:] if self._bos_added and input_ids[0] == bos else input_ids)
        # The tokenizer's settings for cutting and padding are its own state, which threads share.
        with self._tokenizer_lock:
            text: str = self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            read = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)[
                "input_ids"
            ]
        if [*([bos] if self._bos_added else []), *read] != list(input_ids):
            raise RefusalError(
                f"a prompt of {len(input_ids)} tokens cannot be sent as text, which would be read as other tokens "
                f"({len(read) + self._bos_added} of them): use a server that takes token ids"
            )
        return text

    def _failed(self, failure: Exception | None, answered: int, total: int) -> RunFailure:
        after = f"after {answered} of {total} answers"
        if isinstance(failure, RefusalError):
            return RunFailure(f"the server at {self.address} refused a prompt {after} ({failure})")
        reason = failure.reason if isinstance(failure, FaultError) else "an unexpected error, shown above"
        return RunFailure(
            f"the server at {self.address} stopped answering ({reason}) {after}; run the same command again to go on"
        )

    def _only(self, listed: list[str]) -> str:
        if len(listed) != 1:
            raise RopewalkError(
                f"the server at {self.address} serves {_names(listed)}; name one model with --server-model"
            )
        return listed[0]

    def _client(self, timeout: float) -> Any:
        return self._openai.OpenAI(
            base_url=self._base_url,
            api_key=self._api_key,
            timeout=self._openai.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
            # Ours count answers without sense as well, and stop when another request has failed.
            max_retries=0,
        )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise for further fields of a request that cannot be sent.

    Raises:
        RopewalkError: for a name that is none, a field that decides what is asked or how an answer reads, or a value
            that JSON does not have.
    """
    for name, value in extra.items():
        if not name.isidentifier():
            raise RopewalkError(f"{name!r} is no name of a request's field")
        if name in RESERVED or name in UNREADABLE:
            raise RopewalkError(f"the field {name} of a request is ropewalk's own to set; leave it out")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RopewalkError(f"the field {name} of a request is no JSON value: {value!r}") from error


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS in front of a text by itself."""
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
            "asking a server needs the openai package, which is not installed: pip install 'ropewalk[server]'"
        ) from error
    return openai


def _key(given: str | None) -> str:
    source = "api_key" if given is not None else KEY_VARIABLE
    key = (given if given is not None else os.environ.get(KEY_VARIABLE, "")).strip()
    if not key.isascii() or not key.isprintable():
        raise RopewalkError(f"the API key in {source} has characters that no HTTP header may have")
    return key or NO_KEY


LONGEST_REMARK = 300
"""Characters of a server's own words that an error message repeats."""

LONGEST_WAIT = 60.0
"""Seconds that a server's Retry-After is taken at its word."""

_FINISHED = {"stop": True, "length": False}
_BROKEN_OFF = ("abort", "error")


class FaultError(Exception):
    """One attempt failed in a way that another may not.

    Attributes:
        reason: in words, on one line.
        wait: seconds that the server asks to wait, or None.
        status: of HTTP; None where no answer came, or one that makes no sense.
    """

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait, self.status = reason, wait, status


@dataclass(frozen=True)
class Completion:
    """What a server added to a prompt; the fields are those of an Answer."""

    text: str
    new_tokens: int | None
    finished: bool | None
    prompt_tokens: int | None = None


def read_completion(body: bytes) -> Completion:
    """The first choice of an answer of ``/completions``.

    Raises:
        FaultError: if it is not JSON, has no choice with a text, or was broken off by the server.
    """
    value = _json(body)
    match value:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            pass
        case _:
            raise FaultError(f"an answer without a text: {one_line(body)}")
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise FaultError(f"the server broke an answer off ({reason})")
    usage = value.get("usage")
    tokens = _whole(usage, "completion_tokens")
    return Completion(
        _whole_characters(text),
        tokens,
        _FINISHED.get(reason) if isinstance(reason, str) else None,
        _whole(usage, "prompt_tokens"),
    )


def _whole(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int else None


def read_models(body: bytes) -> list[str]:
    """Names of the models that an answer of ``/models`` lists.

    Raises:
        FaultError: if it is not such a list.
    """
    match _json(body):
        case {"data": list(entries)}:
            names = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
            if all(isinstance(name, str) for name in names):
                return [str(name) for name in names]
    raise FaultError(f"no list of models: {one_line(body)}")


def server_message(body: object, status: int) -> str:
    """What a server says of a request that it refused, on one line.

    Args:
        body: the JSON value under ``error``, or the whole answer: servers differ.
        status: HTTP status, said where there are no words.
    """
    if isinstance(body, Mapping):
        said = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    else:
        said = body
    return one_line(said if isinstance(said, str) else json.dumps(said, default=str) if said else "") or (
        f"status {status} without a word"
    )


def named_fields(body: object, fields: Collection[str]) -> tuple[str, ...]:
    """The fields of a request that a server's refusal of it names.

    FastAPI lists errors with their place in the request, OpenAI has a ``param``, and older vLLM writes FastAPI's list
    into the message. Where a place is given, the words count no more: they may repeat the whole request. Else a name
    counts where it stands as a word; ``model`` and ``prompt``, which are words of the language too, only in quotes.

    Args:
        body: the JSON value under ``error``, or the whole answer.
        fields: names of the fields that were sent.

    Returns:
        In the order of ``fields``; none where the refusal is about something else.

    Example:
        >>> named_fields({"detail": "Unexpected fields in the request: {'best_of'}"}, ["prompt", "best_of"])
        ('best_of',)
    """
    value = body if isinstance(body, Mapping) else {}
    said = [value.get(key) for key in ("message", "detail", "error")] if value else [body]
    words = "\n".join(
        each if isinstance(each, str) else json.dumps(each, default=str) for each in said if each
    )
    words = words[:_MOST_WORDS]
    places = set(_PLACE.findall(words))
    for errors in said:
        for error in errors if isinstance(errors, list) else ():
            place = error.get("loc") if isinstance(error, Mapping) else None
            places |= {each for each in place if isinstance(each, str)} if isinstance(place, list) else set()
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


def one_line(said: str | bytes) -> str:
    """Somebody else's words, fit for an error message: one line, nothing that moves a terminal, not long."""
    # Four bytes a character at most; the rest of a megabyte of HTML need not be read.
    text = said[: 4 * LONGEST_REMARK].decode("utf-8", "replace") if isinstance(said, bytes) else said
    text = text[: 4 * LONGEST_REMARK]
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= LONGEST_REMARK else line[: LONGEST_REMARK - 1] + "…"


def retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, a minute at most; None where it says no number."""
    if header is None or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
        return None
    return min(float(header), LONGEST_WAIT)


def public_address(base_url: str) -> str:
    """An address without user and password, for the record.

    Raises:
        RopewalkError: if it is no address of an HTTP server, or has a query.
    """
    try:
        parts = urlsplit(base_url)
        # A name that has no IDNA form, or a port that is no number, is a ValueError like a bracket left open.
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
        good = named and parts.scheme in ("http", "https") and base_url.isprintable() and " " not in base_url
    except ValueError:
        good = False
    if not good:
        # Not repeated here: what stands before an @ may be a password.
        shown = base_url.rpartition("@")[2]
        raise RopewalkError(f"{shown!r} is no address of a server; write it like http://localhost:8000/v1")
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    if parts.query or parts.fragment:
        raise RopewalkError(f"the address {address} of a server goes on after its path; leave out ? and #")
    return address


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise FaultError(f"an answer that is no JSON: {one_line(body) or 'nothing at all'}") from None


def _whole_characters(text: str) -> str:
    """JSON may hold halves of characters, which no file takes: pairs are joined, and the rest replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
