"""Backend for servers with an OpenAI-compatible endpoint, of completions or of chats.

vLLM, SGLang, llama.cpp's server and ``transformers serve`` all have this endpoint but accept different requests: some
reject fields that OpenAI does not define, some reject token ids. A trial request for one token detects this before the
first prompt, and the backend's description and notes record the outcome.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx2

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.dispatch import answers_of, check_requests
from ropewalk.evaluation.backends.http_limits import limited_client, within
from ropewalk.evaluation.backends.protocol import (
    END_OF_THOUGHTS,
    PAIR,
    THOUGHTS,
    TRIAL,
    Answer,
    GenerationRequest,
    Rejection,
)
from ropewalk.evaluation.backends.responses import (
    Completion,
    FaultError,
    RefusalError,
    error_value,
    named_fields,
    one_line,
    read_chat,
    read_completion,
    read_json,
    read_models,
    retry_after,
    server_message,
)
from ropewalk.evaluation.backends.served import PLACES, Served, from_models, names_model
from ropewalk.evaluation.backends.serving import RESERVED, Serving, public_address
from ropewalk.evaluation.backends.text_counters import (
    SAMPLE,
    SECONDS_BETWEEN_LINES,
    ServerTokenizer,
    TextCounter,
    WordCounter,
)
from ropewalk.io.progress import Sparing
from ropewalk.io.urls import credentials, without

KEY_VARIABLE = "OPENAI_API_KEY"
LONGEST_BACKOFF = 8.0
"""Maximum seconds between two attempts, unless the server asks for more."""

SILENT = 3.0
"""Seconds that a request may wait for further attempts before the user is told."""

CONNECT_TIMEOUT = 10.0
CHECK_TIMEOUT = 30.0
"""Seconds to wait for a connection (``CONNECT_TIMEOUT``), and for the list of models (``CHECK_TIMEOUT``)."""

GREEDY: Mapping[str, Any] = {"repetition_penalty": 1.0}
"""Fields that switch penalties off. vLLM takes missing fields from the checkpoint's generation_config.json, and
penalties affect greedy decoding too."""

OPENAI_GREEDY: Mapping[str, Any] = {"frequency_penalty": 0.0}
"""Replaces ``GREEDY`` if the server rejects it: ``transformers serve`` derives the repetition penalty from this
field, by adding 1."""

SHOWN_MODELS = 5

UNAUTHORIZED, TOO_MANY, UNAVAILABLE = 401, 429, 503
"""HTTP status of a server without a valid API key, at its rate limit, and overloaded or starting."""


class ServerBackend:
    """Gets greedy answers from a server.

    Args:
        serving: address of the server and format of its requests. Fields of ``extra`` are always sent and override
            ``GREEDY``.
        tokenizer: the model's tokenizer; needed to send text. The server must use the same one.
        api_key: API key; None reads ``OPENAI_API_KEY`` from the environment. It is never printed or recorded.
        backoff: seconds before the second attempt; doubles with each further attempt, up to 8.
        report: called with a sentence on what takes long, from time to time.

    Raises:
        RopewalkError: if an argument is invalid.
    """

    def __init__(
        self,
        serving: Serving,
        tokenizer: Any = None,
        api_key: str | None = None,
        backoff: float = 0.5,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not 0 <= backoff < math.inf:
            raise RopewalkError(f"backoff must be 0 or more seconds, got {backoff}")
        self.address = public_address(serving.url)
        self.model = serving.model
        self.concurrency, self.timeout, self.retries = serving.concurrency, serving.timeout, serving.retries
        self.backoff = backoff
        self._report = report
        self._waiting = Sparing(report, SECONDS_BETWEEN_LINES)
        self.extra = serving.extra
        self.notes: list[str] = []
        """Notes for the user about the answers; complete after :meth:`check`."""
        self.served = Served()
        """What the server says of its model; known after :meth:`find`."""
        self.as_turns = serving.endpoint == "chat"
        self._auto = serving.send == "auto"
        self._text_sent = serving.send == "text"
        self._own = {name: value for name, value in GREEDY.items() if name not in self.extra}
        self._left_out: list[str] = []
        self._tokenizer_lock = threading.Lock()
        self._pair_lock = threading.Lock()
        self._pair_tokens: int | None = None
        self._base_url = serving.url
        self._api_key = _key(api_key)
        self._secrets = [*([self._api_key] if self._api_key else []), *credentials(serving.url)]
        self._found = self._checked = False
        self._probed: set[int] = set()
        self._models = b""
        self._listed: list[str] | None = None
        self._trial_answer: Completion | None = None
        self.use(tokenizer)

    def use(self, tokenizer: Any) -> None:
        """Encode with this tokenizer from now on; :meth:`find` needs none, so it can be loaded afterwards."""
        self.tokenizer = tokenizer
        self._bos_added = tokenizer is not None and _adds_bos(tokenizer)
        # Only a vocabulary says how long a token can be.
        files = tokenizer is not None and not isinstance(tokenizer, TextCounter)
        self._longest_token = max(map(len, tokenizer.get_vocab())) if files else None
        self._approximate: bool = getattr(tokenizer, "approximate", False)
        if self._approximate:
            self._text_sent = True

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

    def find(self, preferred: str | None = None) -> str:
        """Find the model on the server, without a tokenizer.

        A named model need not be in the server's list: ``transformers serve`` lists the models in the Hub cache. Such
        a model is asked for one token.

        Args:
            preferred: the model if none is named and the server lists it.

        Returns:
            The name of the model on the server.

        Raises:
            RopewalkError: if the server cannot be reached, or does not serve the model.
        """
        # A working server lists its models at once; a wrong address should not take the ten minutes of an answer.
        seconds = min(self.timeout, CHECK_TIMEOUT)
        with self._client(seconds) as client:
            try:
                self._models = self._content(client, "models", seconds)
            except FaultError as fault:
                if fault.status is None:
                    raise RopewalkError(
                        f"no model server responds at {self.address} ({fault.reason}); start a server there, or "
                        "correct the address"
                    ) from fault
                # With a named model, a list that fails with an HTTP status does not matter: the server is there.
                if self.model is None:
                    raise RopewalkError(
                        f"the server at {self.address} does not list its models ({fault.reason}); try again when the "
                        "server has loaded its model, name the model with --server-model, or correct the address"
                    ) from fault
            except RefusalError as refusal:
                # A list may be kept from a key that answers are given to; the request below shows it.
                if refusal.status == UNAUTHORIZED and self.model is None:
                    raise RopewalkError(self._no_access(refusal)) from refusal
                if self.model is None:
                    raise RopewalkError(
                        f"the server at {self.address} does not list its models ({refusal}); name the model with "
                        "--server-model, or correct the address: an OpenAI-compatible address usually ends in /v1"
                    ) from refusal
            else:
                self._listed = self._names_in(self._models)
        if self.model is None:
            known = preferred if preferred in (self._listed or ()) else None
            self.model = known or self._only(self._listed or [])
        elif self.model not in (self._listed or ()):
            self._require_answer()
        self.served = self._says(self._models)
        self._found = True
        return self.model

    def _require_answer(self) -> None:
        """Raise if the server does not know the model that is named; any other trouble is for :meth:`check` to see."""
        turns = (("user", TRIAL),) if self.as_turns else ()
        with self._client(self.timeout) as client:
            try:
                self._create(client, TRIAL, turns, 1)
            except FaultError:
                pass
            except RefusalError as refusal:
                if refusal.status in (404, 405, UNAUTHORIZED):
                    raise RopewalkError(self._refused(refusal)) from refusal

    def check(self) -> str:
        """Find the model on the server, and detect with a trial request what the server accepts.

        Fields of ``GREEDY`` that the server rejects are omitted, and ``auto`` switches from ids to text if needed; the
        notes report both.

        Returns:
            The name of the model on the server.

        Raises:
            RopewalkError: as :meth:`find`, or if the server rejects fields that determine the answer.
        """
        if self._text_sent and self.tokenizer is None:
            raise RopewalkError("send=text needs the model's tokenizer; pass the tokenizer, or set send=ids")
        if not self._found:
            self.find()
        with self._client(self.timeout) as client:
            trial = self._agree(client)
            self._check_named(trial.model)
            if isinstance(self.tokenizer, WordCounter):
                self.tokenizer.measure(lambda text: self._tokens_read(client, text))
            elif isinstance(self.tokenizer, TextCounter) and self.as_turns:
                if not trial.prompt_tokens:
                    raise RopewalkError(
                        f"the server at {self.address} does not report the tokens of prompts, so those of its chat "
                        "template are unknown; give --tokenizer a folder or a Hub id"
                    )
                self.tokenizer.around = max(trial.prompt_tokens - self._count(TRIAL), 0)
            elif self.as_turns and self.tokenizer is not None and trial.prompt_tokens:
                self._refuse_other_tokenizer(client, trial.prompt_tokens)
        if not trial.prompt_tokens:
            self.notes.append(
                "The server does not report how many tokens of a prompt it read, so ropewalk cannot tell whether it "
                "shortens prompts."
            )
        self._trial_answer = trial
        self._checked = True
        return str(self.model)

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refuse_other_tokenizer(self, client: httpx2.Client, trial: int) -> None:
        """Raise if the server's tokenizer is not the local one, by the tokens that a longer text has more.

        What the server's template writes around a text is not known, but it is the same around both, which begin and
        end alike.

        Args:
            client: sends the request.
            trial: tokens of the trial prompt by the server's count.
        """
        text = f"{TRIAL} {SAMPLE.strip()} {TRIAL}"
        read, more = self._tokens_read(client, text), self._count(text) - self._count(TRIAL)
        if read and read - trial != more:
            raise RopewalkError(
                f"the server at {self.address} counts {read - trial} tokens of a text for which the local tokenizer "
                f"counts {more}, so the tokenizer is not that of the served model; give --tokenizer the model's folder "
                "or Hub id, or --tokenizer words"
            )

    def _check_named(self, named: str | None) -> None:
        """Check that the server answers requests for this model with this model."""
        assert self.model is not None
        if named is None or names_model(self._models, self.model, named):
            return
        what = f"the server at {self.address} answers requests for {self.model} as {one_line(named)}"
        if self.model in (self._listed or ()):
            raise RopewalkError(
                f"{what}, which is another model; name the model to measure with --server-model"
            )
        # A name that the server does not list may be an alias, such as the name of a deployment.
        self.notes.append(f"{what}; check that this is the model to measure")

    def _names_in(self, body: bytes) -> list[str]:
        try:
            return read_models(body)
        except FaultError as fault:
            raise RopewalkError(
                f"{self.address.rstrip('/')}/models does not return an OpenAI-style list of models ({fault.reason}); "
                "give the address of a model server's API, which usually ends in /v1"
            ) from fault

    def _says(self, models: bytes) -> Served:
        """Return what the list of models says of this one, or else what other paths of the server say."""
        assert self.model is not None
        found = from_models(models, self.model)
        seconds = min(self.timeout, CONNECT_TIMEOUT)
        with self._client(seconds) as client:
            for path, read in PLACES:
                if found.context is not None:
                    break
                try:
                    body = self._content(client, f"{self._root}{path}", seconds)
                except (FaultError, RefusalError):
                    continue
                said = read(body)
                found = Served(said.context, found.root or said.root, said.source)
        return found

    def tokens_read(self, text: str, turns: Sequence[tuple[str, str]]) -> int | None:
        """The tokens of a prompt by the server's count, with what it writes around it; None if it reports none.

        Args:
            text: the prompt.
            turns: the same for an endpoint of chats.

        Raises:
            RopewalkError: if the server does not take the prompt.
        """
        with self._client(self.timeout) as client:
            return self._tokens_read(client, text, turns)

    def _tokens_read(
        self, client: httpx2.Client, text: str, turns: Sequence[tuple[str, str]] = ()
    ) -> int | None:
        try:
            body = self._create(client, text, turns or (("user", text),), 1)
            return (read_chat(body) if self.as_turns else read_completion(body)).prompt_tokens
        except (FaultError, RefusalError) as error:
            raise RopewalkError(f"the server at {self.address} does not take a text: {error}") from error

    def require_length(self, length: int) -> None:
        """Raise if the server says that its context is shorter than this many tokens; call :meth:`find` first.

        A server whose tokens are estimated gets a text of this length, once: some cut longer ones without a word.

        Raises:
            RopewalkError: names the server and both lengths.
        """
        self.served.require(length, self.address)
        if not isinstance(self.tokenizer, WordCounter) or not self._checked or length in self._probed:
            return
        text, least = self.tokenizer.probe(length)
        with self._client(self.timeout) as client:
            read = self._tokens_read(client, text)
        if read is not None and read < least:
            raise RopewalkError(
                f"the server at {self.address} read only {read:,} of at least {least:,} tokens of a text; serve the "
                f"model with a context of {length:,} tokens, or give shorter --lengths"
            )
        self._probed.add(length)

    def _agree(self, client: Any) -> Completion:
        """Send the trial request with fewer and fewer optional fields until the server accepts it.

        Returns:
            The answer to the trial request.
        """
        written_otherwise = False
        while True:
            ids = self._trial()
            turns = (("user", TRIAL),) if self.as_turns else ()
            try:
                found = self._completion_with_retries(
                    client, GenerationRequest(ids, 1, len(ids) + 1, turns, text=TRIAL), threading.Event()
                )
            except FaultError as fault:
                raise RopewalkError(
                    f"the server at {self.address} does not answer a request for one token ({fault.reason}); restart "
                    "the server, or correct the address"
                ) from fault
            except RefusalError as refusal:
                self._do_without(refusal)
                continue
            read = found.prompt_tokens
            # A server that reports no usage gives nothing to compare, and neither does an estimate; a template of the
            # server's writes tokens of its own.
            if not self._text_sent or not read or read == len(ids) or self._approximate or self.as_turns:
                return found
            # The server may add BOS where the tokenizer does not, or the other way round; try that once.
            if written_otherwise or self.tokenizer.bos_token_id is None:
                raise RopewalkError(
                    f"the server at {self.address} counts {read} tokens for {TRIAL!r}, but the local tokenizer counts "
                    f"{len(ids)}; give the tokenizer of the served model as MODEL"
                )
            written_otherwise, self._bos_added = True, not self._bos_added

    def _do_without(self, refusal: RefusalError) -> None:
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
        raise RopewalkError(self._refused(refusal)) from refusal

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

    def _refused(self, refusal: RefusalError) -> str:
        """Return the error message for a rejected trial request."""
        reason = f"the server at {self.address} rejects a request for one token ({refusal})"
        given = [name for name in refusal.named if name in self.extra]
        needed = [name for name in refusal.named if name in RESERVED]
        if refusal.status is None:
            return f"the server at {self.address} cannot be used: {refusal}"
        if refusal.status == UNAUTHORIZED:
            return self._no_access(refusal)
        if refusal.status in (404, 405) and self.model in (self._listed or ()):
            path, remedy = "/completions", "give --endpoint chat together with --chat"
            if self.as_turns:
                path, remedy = "/chat/completions", "remove --endpoint chat"
            return f"the server at {self.address} serves {self.model}, but has no endpoint {path} ({refusal}); {remedy}"
        if refusal.status == 404:
            if self._listed is None:
                return f"{reason}; an OpenAI-compatible address usually ends in /v1"
            others = _names(self._listed)
            return f"the server at {self.address} does not serve {self.model}; it serves {others} ({refusal})"
        if given:
            return f"{reason}; remove {' and '.join(given)} from --server-extra"
        if not self._text_sent and set(needed) <= {"prompt"} and "prompt" in str(refusal):
            needs = "" if self.tokenizer is not None else ", which needs the tokenizer"
            return f"{reason}; if it rejects token ids, give --send text{needs}"
        if needed:
            return (
                f"{reason}; answers are comparable only if every request sets {' and '.join(needed)}, so the model "
                "cannot be measured on this server"
            )
        return reason

    def _no_access(self, refusal: RefusalError) -> str:
        return (
            f"the server at {self.address} does not accept the API key ({refusal}); set the environment variable "
            f"{KEY_VARIABLE} to one that it accepts"
        )

    def _trial(self) -> tuple[int, ...]:
        """Return the trial prompt as token ids; without a tokenizer, the id 0, which every vocabulary has."""
        if self.tokenizer is None or self._approximate:
            return (0,)
        ids = self.tokenizer(TRIAL, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return tuple(ids if bos is None else [bos, *ids])

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer | Rejection]:
        """Yield one answer or rejection per request as soon as it arrives.

        At most ``concurrency`` requests are sent at a time.

        Raises:
            RopewalkError: by the call itself, if a prompt is empty, ``max_new_tokens`` is less than 1, or
                :meth:`check` fails.
            RunFailure: if the server stops answering, or rejects requests of any content, such as those with this
                API key. Answers to pending requests are yielded first.
        """
        check_requests(requests)
        if requests and not self._checked:
            self.check()
        return answers_of([self], requests)

    def completion(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        found = self._completion_with_retries(client, request, stop)
        return self._complete(request, found, self._least_read(client, request))

    def _completion_with_retries(
        self, client: Any, request: GenerationRequest, stop: threading.Event
    ) -> Completion:
        """Return the server's completion of a prompt, with retries after temporary faults."""
        attempt, limited, backoff = 0, 0.0, min(self.backoff, LONGEST_BACKOFF)
        waited, requests = 0.0, 0
        while True:
            try:
                body = self._request(client, request)
                found = read_chat(body) if self.as_turns else read_completion(body)
                self._refuse_contradiction(request, found)
                return found
            except FaultError as error:
                fault = error
            # A server that asks for a pause knows better than our own backoff; 0, or a date that has passed by its
            # clock, asks for none. Random, so that requests that were rejected together do not come back together.
            wait = fault.wait or backoff * random.uniform(1, 1.5)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            # A server at its rate limit works, and so does one that says when it will: waiting for it is no failed
            # attempt, within the time-out. Without a wait, requests would follow each other for ever.
            works = fault.status == TOO_MANY or (fault.status == UNAVAILABLE and bool(fault.wait))
            if works and wait > 0 and limited + wait <= self.timeout:
                limited += wait
            elif attempt == self.retries:
                break
            else:
                attempt += 1
            waited, requests = waited + wait, requests + 1
            self._tell(fault, "a prompt", wait, waited, requests + 1)
            # Unlike sleep, this wait ends as soon as another thread fails.
            if stop.wait(wait):
                break
        more = f", in the last of {attempt + 1} attempts" if attempt else ""
        raise FaultError(f"{fault.reason}{more}", fault.wait, fault.status)

    def _tell(self, fault: FaultError, what: str, wait: float, waited: float, attempt: int) -> None:
        """Say that a request waits for its next attempt, if it has waited for long."""
        if waited > SILENT:
            self._waiting(
                f"the server at {self.address} does not answer {what} yet ({fault.reason}); waiting {wait:.0f} s "
                f"before attempt {attempt}"
            )

    def _refuse_contradiction(self, request: GenerationRequest, completion: Completion) -> None:
        """Raise for a response that contradicts its request.

        A server may count one token more than it was asked for, the one that ends the answer, and one more than it was
        sent, BOS. Its own template may write as many tokens around a prompt as around the trial's.

        Raises:
            FaultError: names what contradicts; another attempt may reach another replica of the model.
        """
        trial, named = self._trial_answer, completion.model
        if trial is not None and trial.model and named and named != trial.model:
            raise FaultError(
                f"the response names the model {one_line(named)}, but that to the trial request named "
                f"{one_line(trial.model)}"
            )
        read, written, asked = completion.prompt_tokens, completion.new_tokens, request.max_new_tokens
        # The trial asks for one token, and some servers write a few at least.
        if written is not None and not 0 <= written <= (math.inf if trial is None else asked + 1):
            raise FaultError(
                f"the server reports an answer of {one_line(str(written))} tokens, but at most {asked} were asked for"
            )
        sent = len(request.input_ids)
        most: float = sent + 1
        if self.as_turns:
            most = sent + (trial.prompt_tokens if trial and trial.prompt_tokens else math.inf)
        elif self._text_sent and trial is None:
            # The trial of text finds out which of the two writes BOS, and says itself if neither fits.
            most = math.inf
        if self._approximate:
            most = math.inf
        if read is not None and not 0 <= read <= most:
            raise FaultError(
                f"the server reports a prompt of {one_line(str(read))} tokens, but {sent} were sent"
            )
        if self._longest_token is not None and trial is not None:
            # Each token adds at most its own characters and a space; the server may write marks around thoughts.
            marks = len(THOUGHTS) + len(END_OF_THOUGHTS)
            if len(completion.text) > (asked + 1) * (self._longest_token + 1) + marks:
                raise FaultError(
                    f"the answer has {len(completion.text):,} characters, more than {asked} tokens can have"
                )

    def _least_read(self, client: httpx2.Client, request: GenerationRequest) -> int:
        """Fewest tokens that a server reads of a prompt which it does not truncate."""
        if not self.as_turns:
            return len(request.input_ids)
        with self._pair_lock, suppress(RopewalkError):
            if request.pair_tokens and self._pair_tokens is None:
                last = (("user", TRIAL),)
                one, three = (self._tokens_read(client, TRIAL, turns) for turns in (last, (*PAIR, *last)))
                self._pair_tokens = (three or 0) - (one or 0)
        # A server that applies its own template may write fewer tokens around the same texts. In a long chat, these
        # would hide that turns are missing.
        known = request.pair_tokens > 0 and self._pair_tokens == request.pair_tokens
        return request.content_tokens + (request.around_earlier if known else 0)

    def _complete(self, request: GenerationRequest, completion: Completion, sent: int) -> Completion:
        """Check that the server neither truncated the prompt nor ran out of context for the answer.

        Args:
            request: the prompt.
            completion: what the server answered.
            sent: fewest tokens that it must have read.

        Raises:
            RefusalError: if the token counts that the server reports show either.
        """
        read = completion.prompt_tokens
        # Some servers report 0 for unknown. A different tokenizer would have failed the trial in :meth:`_agree`.
        if read and read < sent and not self._approximate:
            raise RefusalError(
                f"the server read only {read} of the {sent} tokens of the prompt; serve the model with a longer context"
            )
        # Ended by length before max_tokens: only the end of the server's context remains as the reason.
        if (
            completion.finished is False
            and completion.new_tokens is not None
            and completion.new_tokens < request.max_new_tokens
        ):
            raise RefusalError(
                f"the server ran out of context after {completion.new_tokens} of {request.max_new_tokens} tokens of "
                "the answer; serve the model with a longer context"
            )
        return completion

    def _request(self, client: httpx2.Client, request: GenerationRequest) -> bytes:
        prompt: str | list[int] = ""
        if not self.as_turns:
            prompt = self._text(request) if self._text_sent else list(request.input_ids)
        return self._create(client, prompt, request.turns, request.max_new_tokens)

    def _create(
        self,
        client: httpx2.Client,
        prompt: str | list[int],
        turns: Sequence[tuple[str, str]],
        max_new_tokens: int,
    ) -> bytes:
        """Ask for an answer to a prompt, or to turns at an endpoint of chats."""
        messages = [{"role": role, "content": text} for role, text in turns]
        asked: dict[str, Any] = {"messages": messages} if self.as_turns else {"prompt": prompt}
        fixed = {"model": self.model, **asked, "max_tokens": max_new_tokens, "temperature": 0.0}
        path = "chat/completions" if self.as_turns else "completions"
        return self._content(client, path, self.timeout, {**fixed, **self._own, **self.extra})

    def _content(
        self, client: httpx2.Client, path: str, seconds: float, value: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the body of a response that takes so many seconds at most, or raise FaultError or RefusalError.

        Args:
            client: sends the request.
            path: below the address, or an address.
            seconds: time for the whole response.
            value: JSON value to post; None to get.
        """
        late = FaultError(f"no response within {seconds:g} s")
        url = path if "://" in path else f"{self._base_url.rstrip('/')}/{path}"

        def respond() -> httpx2.Response:
            try:
                return client.get(url) if value is None else client.post(url, json=value)
            except httpx2.TimeoutException as error:
                raise late from error
            except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
                raise FaultError(self._hidden(str(error)) or "connection lost") from error

        try:
            response = within(seconds, respond, FaultError)
        except TimeoutError as error:
            raise late from error
        content = response.content
        # Here, so that no answer, list or message that the server makes of them is kept.
        if self._secrets:
            content = without(content.decode("utf-8", "surrogateescape"), self._secrets).encode(
                "utf-8", "surrogateescape"
            )
        if response.is_success:
            return content
        status, said = response.status_code, error_value(content)
        message = f"HTTP {status}: {self._hidden(server_message(said, status))}"
        # Time-outs, rate limits and faults of the server may pass; any other status would come again.
        if status in (408, 429) or status >= 500:
            raise FaultError(message, retry_after(response.headers.get("retry-after")), status)
        raise RefusalError(message, status, named_fields(said, (*RESERVED, *self._own, *self.extra)))

    def _hidden(self, text: str) -> str:
        # A server's message may quote the request together with its key, however short.
        return without(text, self._secrets, 1)

    def _text(self, request: GenerationRequest) -> str:
        """Return a text that the local tokenizer encodes as the ids of a prompt; the server's should do the same.

        Raises:
            RefusalError: if the local tokenizer encodes the text differently.
        """
        if isinstance(self.tokenizer, TextCounter):
            # What the server counted is what it gets.
            return request.text if self._bos_added else f"{self.tokenizer.bos_token or ''}{request.text}"
        input_ids, bos = request.input_ids, self.tokenizer.bos_token_id
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
                f"({len(read) + self._bos_added} of them); give --tokenizer words, or --chat --endpoint chat, or use a "
                "server that accepts token ids"
            )
        return text

    def failed(self, failure: Exception | None, answered: int, total: int) -> RunFailure:
        after = f"after {answered} of {total} answers"
        if isinstance(failure, RefusalError) and failure.status == UNAUTHORIZED:
            return RunFailure(f"{self._no_access(failure)}, and run the same command again to resume")
        if isinstance(failure, RefusalError):
            return RunFailure(f"the server at {self.address} rejected a prompt {after} ({failure})")
        reason = failure.reason if isinstance(failure, FaultError) else "an unexpected error, shown above"
        return RunFailure(
            f"the server at {self.address} stopped answering prompts {after}; run the same command again to resume "
            f"(reason: {reason})"
        )

    def _only(self, listed: list[str]) -> str:
        if not listed:
            raise RopewalkError(
                f"the server at {self.address} lists no models; load a model there, or name the model with "
                "--server-model"
            )
        if len(listed) > 1:
            raise RopewalkError(
                f"the server at {self.address} serves {_names(listed)}; name one model with --server-model"
            )
        return listed[0]

    def own_tokenizer(self) -> ServerTokenizer:
        """The tokenizer behind the server's ``/tokenize``; call :meth:`find` first.

        Raises:
            RopewalkError: if the server has none.
        """
        assert self.model is not None
        try:
            return ServerTokenizer(self._post, self.model, self.concurrency, self._report)
        except RopewalkError as error:
            raise RopewalkError(f"{self.address}: {error}") from error

    def _post(self, path: str, value: dict[str, Any]) -> Any:
        waited = 0.0
        for attempt in range(self.retries + 1):
            try:
                with self._client(self.timeout) as client:
                    body = self._content(client, f"{self._root}{path}", self.timeout, value)
                return read_json(body)
            except FaultError as fault:
                if attempt == self.retries:
                    raise
                wait = fault.wait or min(self.backoff * 2**attempt, LONGEST_BACKOFF)
                waited += wait
                self._tell(fault, path, wait, waited, attempt + 2)
                time.sleep(wait)
        raise AssertionError("a request has at least one attempt")

    @property
    def _root(self) -> str:
        """The address that paths other than the API's are below."""
        return self._base_url.rstrip("/").removesuffix("/v1")

    def client(self) -> Any:
        """A client of the server, to be closed by the caller."""
        return self._client(self.timeout)

    def _client(self, timeout: float) -> httpx2.Client:
        key = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        # A server that is off should show within seconds, although an answer may take minutes.
        return limited_client(timeout, min(timeout, CONNECT_TIMEOUT), key)


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer adds BOS to a text."""
    read = tokenizer(TRIAL, verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and read[:1] == [tokenizer.bos_token_id]


def _names(models: Sequence[str]) -> str:
    names = one_line(", ".join(models[:SHOWN_MODELS]))
    more = len(models) - SHOWN_MODELS
    return f"{names} and {more} more" if more > 0 else names or "nothing"


def _key(given: str | None) -> str:
    source = "api_key" if given is not None else KEY_VARIABLE
    key = (given if given is not None else os.environ.get(KEY_VARIABLE, "")).strip()
    if not key.isascii() or not key.isprintable():
        raise RopewalkError(f"the API key in {source} has characters that are not allowed in an HTTP header")
    return key
