"""A server with an OpenAI-compatible completion endpoint (vLLM, SGLang, llama.cpp) answers prompts."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal, get_args

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.completions import (
    Completion,
    FaultError,
    public_address,
    read_completion,
    read_models,
    retry_after,
    server_message,
)
from ropewalk.evaluation.backends.protocol import Answer, Request

Send = Literal["ids", "text"]

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

SHOWN_MODELS = 5


class RefusalError(Exception):
    """The server will not answer, however often it is asked."""


class ServerBackend:
    """Greedy answers of a server.

    Args:
        base_url: the server's address with its path, as ``http://localhost:8000/v1``.
        model: the name under which it serves the model; None takes the only one.
        tokenizer: the model's own; needed to send text.
        concurrency: most requests at once.
        timeout: seconds without a word from the server after which an attempt has failed.
        retries: further attempts a prompt after a lost connection, a timeout, HTTP 408, 429 or 5xx, or an
            answer that is none.
        api_key: for servers that ask for one; ``OPENAI_API_KEY`` of the environment if None. It is shown
            nowhere.
        send: ``ids`` sends the prompt's token ids, with our BOS and nothing else. ``text``, for servers that
            take no ids, sends the prompt's text without its BOS, since such a server puts its own in front
            and cuts the text into tokens itself: whether those are ours is up to the server.
        backoff: seconds before the second attempt, twice as many before each one after it, up to 8.
        extra_body: settings of the server's own; None is ``GREEDY``. Give ``{}`` to a server that refuses
            settings which OpenAI does not define.

    Raises:
        RopewalkError: if the openai package is missing, or an argument is not what it should be.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        tokenizer: Any = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        api_key: str | None = None,
        send: Send = "ids",
        backoff: float = 0.5,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise RopewalkError(f"{name} must be {least} or more, got {value}")
        if not 0 < timeout < math.inf or not 0 <= backoff < math.inf:
            raise RopewalkError(f"timeout and backoff are seconds, got {timeout} and {backoff}")
        if send not in get_args(Send):
            raise RopewalkError(
                f"unknown way {send!r} to send prompts; choose one of {', '.join(get_args(Send))}"
            )
        if send == "text" and tokenizer is None:
            raise RopewalkError("sending text needs the tokenizer; give it, or send ids")
        self._openai = _openai()
        self.address = public_address(base_url)
        self.model = model
        self.tokenizer = tokenizer
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.send = send
        self.extra_body = dict(GREEDY if extra_body is None else extra_body)
        self._base_url = base_url
        self._api_key = _key(api_key)
        self._checked = False

    @property
    def description(self) -> dict[str, str]:
        """Kind, address, model where it is known, and what is sent."""
        known = {} if self.model is None else {"model": self.model}
        return {"kind": "server", "address": self.address, **known, "prompts": self.send}

    def check(self) -> str:
        """Ask for the list of models, once, without retries.

        Returns:
            The name of the model that will be asked.

        Raises:
            RopewalkError: if the server cannot be reached, or does not serve the model.
        """
        with self._client(min(self.timeout, CHECK_TIMEOUT)) as client:
            try:
                served = read_models(self._content(client.models.with_raw_response.list))
            except FaultError as fault:
                raise RopewalkError(
                    f"no model server answers at {self.address} ({fault.reason}); start it, or give another address"
                ) from fault
            except RefusalError as refusal:
                raise RopewalkError(
                    f"the server at {self.address} does not list its models ({refusal}); an OpenAI-compatible "
                    "address usually ends in /v1"
                ) from refusal
        self.model = self._chosen(served)
        self._checked = True
        return self.model

    def answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
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

    def _answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
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
        requests: Sequence[Request],
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

    def _completion(self, client: Any, request: Request, stop: threading.Event) -> Completion:
        for attempt in range(self.retries + 1):
            try:
                return self._complete(request, read_completion(self._asked(client, request)))
            except FaultError as error:
                fault = error
            wait = min(self.backoff * 2**attempt, LONGEST_BACKOFF) if fault.wait is None else fault.wait
            if attempt == self.retries or stop.wait(wait):
                break
        raise fault

    def _complete(self, request: Request, said: Completion) -> Completion:
        """A prompt that was cut, or an answer that found no room, is no answer of the model's.

        Raises:
            RefusalError: if the server says so.
        """
        asked, read = len(request.input_ids), said.prompt_tokens
        # Zero is no count; text without our BOS may be one token less.
        if read and read < asked - (self.send == "text"):
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

    def _asked(self, client: Any, request: Request) -> bytes:
        prompt = list(request.input_ids) if self.send == "ids" else self._text(request.input_ids)
        return self._content(
            client.completions.with_raw_response.create,
            model=self.model,
            # The client looks at each element of a prompt, a second for 128K ids; an extra field it leaves alone.
            prompt="",
            max_tokens=request.max_new_tokens,
            temperature=0.0,
            extra_body={**self.extra_body, "prompt": prompt},
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
                raise FaultError(message, retry_after(error.response.headers.get("retry-after"))) from error
            raise RefusalError(message) from error
        return content

    def _hidden(self, said: str) -> str:
        return said.replace(self._api_key, "***") if self._api_key != NO_KEY else said

    def _text(self, input_ids: Sequence[int]) -> str:
        ids = input_ids[1:] if input_ids[0] == self.tokenizer.bos_token_id else input_ids
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
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

    def _chosen(self, served: list[str]) -> str:
        names = ", ".join(served[:SHOWN_MODELS])
        if len(served) > SHOWN_MODELS:
            names += f" and {len(served) - SHOWN_MODELS} more"
        if self.model is not None and self.model not in served:
            raise RopewalkError(
                f"the server at {self.address} does not serve {self.model}; it serves {names or 'nothing'}"
            )
        if self.model is None and len(served) != 1:
            raise RopewalkError(f"the server at {self.address} serves {names or 'nothing'}; name one model")
        return self.model or served[0]

    def _client(self, timeout: float) -> Any:
        return self._openai.OpenAI(
            base_url=self._base_url,
            api_key=self._api_key,
            timeout=self._openai.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)),
            # Ours count answers without sense as well, and stop when another request has failed.
            max_retries=0,
        )


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
