"""Commands of ropewalk-core alone: what works, and one sentence with status 2 for what does not."""

import subprocess
import sys

from ropewalk.cli.app import SUMMARIES
from tests.places import ROOT

WORK = [
    ["--help"],
    # The settings of watch lie in a module of training.
    *([name, "--help"] for name in SUMMARIES if name != "watch"),
    ["eval", "compare", "--help"],
    ["recipe", "list"],
    ["recipe", "schema"],
    ["recipe", "show", "demo"],
    ["models"],
    ["rope", "base", "--length", "4k", "--rotary-dim", "128"],
    ["rope", "bound", "--rope-theta", "10000", "--rotary-dim", "128"],
]
NEED = {
    "extend demo": "ropewalk extend needs torch",
    "inspect embedded": "ropewalk inspect needs torch",
    "plan demo": "ropewalk plan needs torch",
    "audit embedded": "ropewalk audit needs torch",
    "verify demo": "ropewalk verify needs torch",
    "search embedded --to 1k --out x.json": "ropewalk search needs",
    "compare demo --vary stages.0.steps=1,2 --out x": "ropewalk compare needs torch",
    "data pack x.jsonl --tokenizer embedded --length 64": "ropewalk data pack needs pyarrow",
    "data stats x.jsonl --tokenizer embedded": "ropewalk data stats needs pyarrow",
    "recipe check demo": "ropewalk recipe check needs torch",
    "watch x": "ropewalk watch needs torch",
    "probe-trainer x": "ropewalk probe-trainer needs torch",
    "rope probe embedded --to 1k": "ropewalk rope probe needs torch",
    "eval embedded": "a model in memory needs torch",
}
PYTHON = {
    "ropewalk.attend": "ModuleNotFoundError: ropewalk.attend needs torch",
    "ropewalk.load_model": "ModuleNotFoundError: ropewalk.load_model needs",
    "ropewalk.extend('demo')": "RopewalkError: ropewalk.extend needs torch",
    "ropewalk.inspect('embedded')": "RopewalkError: ropewalk.inspect needs torch",
    "ropewalk.pack('x.jsonl', tokenizer='embedded')": "RopewalkError: ropewalk.pack needs pyarrow",
    "ropewalk.evaluate('embedded')": "RopewalkError: a model in memory needs torch",
}
PROGRAM = """
from contextlib import redirect_stdout
from io import StringIO
from tests.core_program import without_the_rest
without_the_rest()
import ropewalk
from ropewalk.cli.app import main
for command in {commands}:
    with redirect_stdout(StringIO()):
        status = main(command)
    print(status, flush=True)
for call in {calls}:
    try:
        print(eval(call))
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""


def test_each_command_and_function_works_or_says_in_one_sentence_what_it_needs() -> None:
    commands = [*WORK, *map(str.split, NEED)]
    program = PROGRAM.format(commands=commands, calls=list(PYTHON))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[: len(commands)] == ["0"] * len(WORK) + ["2"] * len(NEED), done.stderr
    install = ", which is not installed; run pip install ropewalk"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for line, start in zip(
        [*errors, *said[len(commands) :]],
        [*(f"error: {each}" for each in NEED.values()), *PYTHON.values()],
        strict=True,
    ):
        assert line.startswith(start)
        assert install in line
