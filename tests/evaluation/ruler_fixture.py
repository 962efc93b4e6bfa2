"""Writes ruler_upstream.json: digests of the prompts that NVIDIA/RULER's own scripts make.

    python -m tests.evaluation.ruler_fixture --upstream CLONE --python PYTHON

CLONE is a checkout of NVIDIA/RULER at c3f5e3b; PYTHON runs its scripts, with numpy, scipy, nltk, wonderwords, tqdm,
yaml, tenacity and transformers installed. Essays are the made-up prose of ruler_cases.py and sentences are split by
ropewalk's own splitter, which needs neither nltk's data nor a download; all else is upstream's.
"""

import argparse
import hashlib
import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

FIXTURE = Path(__file__).parent / "ruler_upstream.json"
PROSE_WORDS = 3000
COUNT = 3
LENGTHS = (1024, 2048, 4096, 8192)
TASKS = (
    *(f"niah_single_{number}" for number in (1, 2, 3)),
    *(f"niah_multikey_{number}" for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
RUN = """
import importlib.util, runpy, sys, yaml
import nltk.tokenize
script, name, splitter = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("splitter", splitter)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
nltk.tokenize.sent_tokenize = module.split_sentences
folder = script + "/data/synthetic"
sys.path.insert(0, folder)
from constants import TASKS
config = yaml.safe_load(open(script + "/synthetic.yaml"))[name]
base = TASKS[config["task"]]
arguments = [x for k, v in config["args"].items() for x in ("--" + k, str(v))]
path = f"{folder}/{config['task']}.py"
sys.argv = [path, "--save_name", name, "--tokens_to_generate", str(base["tokens_to_generate"]), *arguments]
sys.argv += ["--template", base["template"] + base["answer_prefix"], *sys.stdin.read().split("\\n")]
runpy.run_path(path, run_name="__main__")
"""


def upstream(
    scripts: Path, python: str, task: str, length: int, count: int, tokenizer: Path, timeout: float = 120
) -> list[dict[str, object]] | None:
    """Upstream's samples; None where its script does not end, or ends in an error."""
    import ropewalk.evaluation.tasks.haystack_sources as sentences

    with tempfile.TemporaryDirectory() as out:
        arguments = ["--save_dir", out, "--tokenizer_type", "hf", "--tokenizer_path", str(tokenizer)]
        arguments += ["--max_seq_length", str(length), "--num_samples", str(count)]
        command = [python, "-c", RUN, str(scripts), task, str(sentences.__file__)]
        try:
            subprocess.run(
                command,
                input="\n".join(arguments),
                text=True,
                capture_output=True,
                timeout=timeout,
                check=True,
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            return None
        lines = (Path(out) / task / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def main() -> None:
    from ropewalk.evaluation.tasks.words import word_lists
    from tests.evaluation.ruler_cases import prose, template_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument(
        "--tasks", nargs="+", default=TASKS, help="run these, and keep what is there of others"
    )
    options = parser.parse_args()
    scripts = options.upstream / "scripts"
    essays = scripts / "data/synthetic/json/PaulGrahamEssays.json"
    essays.write_text(json.dumps({"text": prose(PROSE_WORDS)}))
    # A large file that a clone often lacks; none of these lengths needs it.
    (scripts / "data/synthetic/json/english_words.json").write_text("{}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        tokenizer = Path(folder)
        template_tokenizer().save_pretrained(tokenizer)
        cases = list(product(options.tasks, LENGTHS))
        made = list(pool.map(lambda case: upstream(scripts, options.python, *case, COUNT, tokenizer), cases))
    found = {f"{task} {length}": _kept(samples) for (task, length), samples in zip(cases, made, strict=True)}
    if set(options.tasks) != set(TASKS):
        found = {**json.loads(FIXTURE.read_text())["samples"], **found}
    value = {
        "upstream": "NVIDIA/RULER c3f5e3b, seed 42",
        "word_lists": word_lists().digest,
        "prose_words": PROSE_WORDS,
        "samples": found,
    }
    FIXTURE.write_text(json.dumps(value, indent=1) + "\n")


def _kept(samples: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
    if samples is None:
        return None
    return [
        {
            "sha256": digest(f"{each['input']}{each['answer_prefix']}"),
            "prefix": each["answer_prefix"],
            "references": each["outputs"],
            "length": each["length"],
        }
        for each in samples
    ]


if __name__ == "__main__":
    main()
