"""Published configs that advice is asked for, and what the commands print of one."""

import json

import pytest

from ropewalk.cli import app as program
from ropewalk.rope import Default, Linear, Llama3, Yarn
from tests.places import CONFIGS

LLAMA_2 = Default(128, 1e4)
LLAMA_3 = Default(128, 5e5)
LLAMA_3_1 = Llama3(128, 5e5, 8.0, 1.0, 4.0, 8192)
QWEN_YARN = Yarn(128, 1e6, 4.0, 32768)
DEEPSEEK_CODER = Linear(128, 1e5, 4.0)

LLAMA = str(CONFIGS / "llama-3-8b.json")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert program.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)
