"""``transformers serve`` itself, a server that validates requests: its answers are those of the model in memory."""

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.evaluation.backends import GenerationRequest, InMemoryBackend, ServerBackend
from ropewalk.evaluation.backends.serving import Serving
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.models.load import load_model
from tests.completion_server import free_port
from tests.programs import Program

# Looked for, not imported: openai alone takes seconds, and only the server's own process needs it.
MISSING = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"transformers serve needs {MISSING}: pip install 'transformers[serving]'"
)

START = """
import sys
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager
# The program is a fork of one that has read the environment already.
constants.HF_HUB_OFFLINE = True
constants.HF_HUB_CACHE = _cache_manager.HF_HUB_CACHE = sys.argv.pop(1)
from transformers.cli.transformers import main
main()
"""
TEMPLATE = "{% for m in messages %}def {{ m.role }}({{ m.content }}):\n{% endfor %}    return"
SECONDS = 180
"""Until the server must answer: it imports torch and loads a model, beside whatever else the machine does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with a repetition penalty, which a server applies unless a request says otherwise."""
    made = tmp_path_factory.mktemp("served") / "demo"
    shutil.copytree(demo_model_path(), made)
    path = made / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 5.0}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of a server with the checkpoint, on this machine alone and offline; it ends with the module."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    # Its own cache: the list of models is read from the hub's, which need not exist.
    own = ["serve", folder, "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    server = Program(START, folder.parent / "hub", *own, environment={"CUDA_VISIBLE_DEVICES": ""})
    try:
        end = time.monotonic() + SECONDS
        while not healthy(address):
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                pytest.fail(f"transformers serve did not start: {''.join(server.communicate())[-2000:]}")
            time.sleep(0.1)
        yield f"{address}/v1"
    finally:
        server.kill()
        server.communicate()


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def requests(tokenizer: Any) -> list[GenerationRequest]:
    encoder = PromptEncoder(tokenizer)
    texts = ["def main(", "The key is 123. The key is", "import os\nimport ", "Übung – 漢字 <|x|>\n\tfor"]
    return [GenerationRequest(encoder.encode(text).input_ids, 24, 200) for text in texts]


@pytest.mark.slow
def test_answers_are_those_of_the_model_in_memory(url: str, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    served = ServerBackend(Serving(url=url, model=str(folder)), tokenizer)
    asked = requests(tokenizer)
    found = {each.index: each for each in served.answers(asked)}
    memory = InMemoryBackend(load_model(str(folder)), tokenizer)
    known = {each.index: each for each in memory.answers(asked)}
    assert [found[n].text for n in range(len(asked))] == [known[n].text for n in range(len(asked))]
    assert {each.new_tokens for each in found.values()} == {24}
    assert served.description["prompts"] == "text"
    assert served.description["left_out"] == ["repetition_penalty"]
    assert len(served.notes) == 2
    # The penalty of the served folder would have made other answers.
    penalised = ServerBackend(
        Serving(url=url, model=str(folder), extra={"frequency_penalty": 4.0}), tokenizer
    )
    assert {each.text for each in penalised.answers(asked)} != {each.text for each in found.values()}


@pytest.mark.slow
def test_a_chat_endpoint_answers_as_the_model_in_memory_does_to_the_same_template(
    url: str, folder: Path
) -> None:
    tokenizer = load_tokenizer(str(folder))
    served = ServerBackend(Serving(url=url, model=str(folder), endpoint="chat"), tokenizer)
    encoder = PromptEncoder(tokenizer, chat=True, system="a", as_turns=True)
    asked = [
        GenerationRequest(encoder.encode(text).input_ids, 16, 200, encoder.turns(text), encoder.count(text))
        for text in ("x, y", "key=12")
    ]
    found = {each.index: each.text for each in served.answers(asked)}
    memory = InMemoryBackend(load_model(str(folder)), tokenizer)
    assert found == {each.index: each.text for each in memory.answers(asked)}


@pytest.mark.slow
def test_the_prompt_is_read_as_its_own_tokens(url: str, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    served = ServerBackend(Serving(url=url, model=str(folder)), tokenizer)
    served.check()
    (request,) = requests(tokenizer)[:1]
    body = {
        "model": str(folder),
        "prompt": served._text(request),
        "max_tokens": 2,
        "temperature": 0,
    }
    question = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(question, timeout=60) as answer:
        assert json.load(answer)["usage"]["prompt_tokens"] == len(request.input_ids)
