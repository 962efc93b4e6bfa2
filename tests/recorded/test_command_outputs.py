"""Every command says what it said before: exit status, JSON and the files it writes, on fixed inputs.

The cases are in ``commands.yaml`` and ``refusals.yaml``, what they said in ``outputs/``. On one machine,
``scripts/command_outputs.py`` compares two versions of the program to the last bit.
"""

from __future__ import annotations

import pytest

from tests.recorded.recorded_cases import command_outputs, differences_from_before, is_reworded

RENAMED: dict[str, str] = {
    "forced": "teacher_forced",
    "materials": "haystack_sources",
    "ladder": "ablation",
    "ladder_samples": "ablation_samples",
    "mends": "mitigations",
}
"""JSON keys and names of tasks that are others on purpose: the old name, and the new one."""

CHANGED_SENTENCES: dict[str, str] = {
    "no text field": (
        "error: ../inputs/documents.jsonl:1: no text field 'body'; the fields are 'text', 'source'; set text_field "
        "(--text-field) to the field that holds the text"
    ),
    "no command": "error: unknown command 'extnd'; did you mean extend? (see ropewalk --help)",
    "no recipe": "error: missing argument RECIPE (see ropewalk extend --help)",
    "an unknown option": "error: unknown option --st; did you mean --set? (see ropewalk extend --help)",
    "an unknown method": (
        "error: unknown RoPE method 'yarm'; choose one of default, theta, linear, ntk, yarn, llama3, longrope, "
        "proportional"
    ),
    "a length without digits": (
        "error: --target: 'lots' is not a length; write a number of tokens such as 131072, 128k or 1M (see ropewalk "
        "inspect --help)"
    ),
    "a trained length of nothing": (
        "error: --from: '0' is 0 tokens; a length must be a whole number of at least 1 (see ropewalk inspect --help)"
    ),
    "a picture of another kind": (
        "error: --plot: a figure is written as .png or .svg, got periods.pdf (see ropewalk inspect --help)"
    ),
    "theta from no length": (
        "error: --from: 'x' is not a length; write a number of tokens such as 131072, 128k or 1M (see ropewalk rope "
        "theta --help)"
    ),
    "rows of no length": (
        "error: --length: '12 monkeys' is not a length; write a number of tokens such as 131072, 128k or 1M (see "
        "ropewalk data pack --help)"
    ),
    "an unknown pattern": (
        "error: unknown --pattern 'causal'; choose from full, intra_document, anchor (see ropewalk data "
        "pack --help)"
    ),
    "too few documents": (
        "error: the documents do not fill one row: 5047 training tokens in 47 documents, but a row takes "
        "1048576 tokens; choose shorter rows, or set remainder (--remainder) to pad"
    ),
    "an unknown source": ("error: unknown source 'wbe' in weights; the sources are web, books, code"),
    "an unknown field in a tag": (
        "error: --tag: the tag '{title}' may contain only the placeholder {source}, without a format "
        "specification (see ropewalk data pack --help)"
    ),
    "a mixture that falls short": (
        "error: source 'web' has no document of 400 tokens or more, but the mixture requests 1,707 tokens "
        "from such documents; set long_factor instead of long_share (long_factor does not require long documents in "
        "every source), or set shortage (--shortage) to cap and use only the available tokens"
    ),
    "a search to no longer length": (
        "error: a search for 256 tokens has nothing to extend, because the checkpoint is trained for 256 tokens; give "
        "a target length above 256 tokens"
    ),
    "a shrinking context": (
        "error: stages.0.context must be longer than the trained length of 512 tokens, got 256"
    ),
    "more layers than there are": "error: --layers must be from 1 to the model's 2 layers, got 6",
    "a table of another name": ("error: --out factors.csv: the name of a factor table must end in .json"),
    "no log to resume": (
        "error: nothing to resume: the log factors.jsonl does not exist; omit --resume to start a search"
    ),
    "numbers of no model": "error: ../inputs/factors.csv does not state the model of its factors; give --model",
    "a model without factors": (
        "error: embedded has no rescale factors: its RoPE is default, not longrope; give a longrope config"
    ),
    "no table to show": (
        "error: ../inputs/recipe.yaml is not a factor table, because it cannot be read as JSON: Expecting value: "
        "line 1 column 1 (char 0)"
    ),
    "an export of no table": (
        "error: ../inputs/longrope.json is not a ropewalk factor table: its format is None, expected "
        "'ropewalk-factors/1'; convert a CSV or a config to a table with ropewalk search import"
    ),
    "an unknown algorithm": (
        "error: unknown --algorithm 'guess'; choose from cma-es, evolution (see ropewalk search --help)"
    ),
    "an unknown rule": "error: unknown rule 'ntkk'; did you mean ntk?",
    "a plan by an unknown rule": (
        "error: unknown rule 'guess'; choose one of recommended, critical-dimension, length-floor, ntk, "
        "lower-bound, schedule:gradient, schedule:lwm, schedule:anchorcontext (also possible: current, "
        "linear, yarn, llama3, theta=VALUE)"
    ),
    "a probe of an unknown rule": (
        "error: unknown rule 'yarrn'; choose one of recommended, critical-dimension, length-floor, ntk, "
        "lower-bound, schedule:gradient, schedule:lwm, schedule:anchorcontext (also possible: current, "
        "linear, yarn, llama3, theta=VALUE)"
    ),
    "an unknown suite": "error: unknown --suite 'pass-key'; did you mean passkey? (see ropewalk eval --help)",
    "an unknown task": "error: unknown task 'passkeys'; did you mean passkey?",
    "lm_eval without tasks": (
        "error: the suite lm_eval needs the names of its tasks; give --lm-eval-tasks, or "
        "lm_eval.harness_names in the evaluation section of a recipe (see ropewalk eval --help)"
    ),
    "a server's model without a server": "error: --server-model m needs --server URL (see ropewalk eval --help)",
    "a dtype that is not audited": (
        "error: --dtypes: cannot audit dtype 'float8'; choose from bfloat16, float16, float32 (see "
        "ropewalk audit --help)"
    ),
    "a factor for theta": "error: 'factor' has no meaning for method 'theta', which takes no parameters",
    "an override without a value": "error: --set needs key=value, got 'output'",
    "an unknown RoPE method in a recipe": (
        "error: recipe ../inputs/recipe.yaml: stages.0.rope.method must be 'default', 'theta', 'linear', "
        "'ntk', 'yarn', 'llama3', 'longrope', 'proportional' or 'auto', got 'yarm'"
    ),
    "nothing to resume": (
        "error: nothing to resume: the folder 'run' contains no run; leave out --resume to start a run, or set output "
        "to the folder of the interrupted run"
    ),
    "a short context without longrope": (
        "error: recipe ../inputs/recipe.yaml: short_context searches the short factors of longrope, but the last "
        "stage's rope is 'theta'; leave out short_context, or end with a longrope stage"
    ),
    "no shift but the one compared with": (
        "error: --shifts 16 leaves nothing to compare, because every shift is compared with --delta2 16; add "
        "another shift, such as --shifts 0,16 (see ropewalk audit --help)"
    ),
    "a probe below the trained length": (
        "error: --to 32 is shorter than the trained length of 256 tokens; give --to 256 or more"
    ),
    "beyond the config": (
        "error: the longest length is 512 tokens, but the model's config states max_position_embeddings "
        "256; extend the model first (ropewalk inspect MODEL --target 512 shows how), or add "
        "--beyond-config to measure the model unchanged"
    ),
    "no chat template": ("error: the tokenizer has no chat template; remove --chat, or use a chat model"),
    "no evaluation to compare": (
        "error: ../inputs has no finished evaluation, because results.json is missing; run the "
        "evaluation to its end first"
    ),
    "no evaluation to rescore": (
        "error: ../inputs has no finished evaluation, because results.json is missing; run the "
        "evaluation to its end first"
    ),
}
"""Refusals whose words were changed on purpose: the case, and what its sentence says now."""

CHANGED: dict[str, str] = {
    "inspect-others.gemma-3-4b to 256k.json.target": "a model with a RoPE for each layer type is extended now",
    "inspect-others.qwen3-next-80b-a3b.json.layers": "recurrent layers have no RoPE",
    "inspect-others.qwen3-next-80b-a3b.json.notes": "and a note says so",
    "inspect.gemma-3-4b.json.notes": "1,048,576 tokens are written out, not 1.04858e+06",
    "inspect-others.gemma-3-4b to 256k.json.notes": "and a note says which layers limit the context",
    "inspect-others.phi-3.5-mini-instruct to 256k.json.target.settings": "a window of 256k holds the target",
    "inspect-others.another trained length.json.target.reasons": "the factor that is replaced is named",
    "inspect-others.qwen2.5-7b-instruct-1m.json.notes": "the note says how a recipe drops dual chunk attention",
    "inspect.mistral-7b-v0.1.json.trained_length": "the length that is documented, not the config's",
    "inspect.mistral-7b-v0.1.json.notes": "and a note names its source",
    "inspect.qwen2.5-7b-instruct-yarn.json.notes": "a note says that the publisher serves this yarn without training",
    "inspect-others.qwen3-8b.json.trained_length": "the length that is documented, not the config's",
    "inspect-others.qwen3-8b.json.notes": "and a note names its source",
    "search.resume what is finished.json.last line on stderr": "the words of the refusal",
    "extend-methods.longrope.json.stages[0].search.cautions": "the words of the sentences",
    "extend-methods.longrope.json.short_factors.cautions": "the words of the sentences",
    "audit.bytes.json.finding": "the three sentences have other words",
    "audit.bytes.json.rope_findings": "and those on the frequencies",
    "audit.without a control.json.finding": "likewise",
    "audit.without a control.json.rope_findings": "likewise",
    "extend-patterns.chunks.json.after[0]": "in bfloat16, gradients of head and anchor are sums in float32",
    "extend-patterns.chunks.files.chunks/metrics.jsonl": "likewise",
    "extend-patterns.two stages.json.after[0]": "a stage goes on with the moments of the stage before",
    "extend-patterns.two stages.files.two/metrics.jsonl[3]": "likewise",
    "evaluate.passkey.files.passkey/run.json": "says what the folder holds; what was measured stands in its steps",
    "extend.theta.files.run/recipe.yaml.history": "changes of the recipe stand in run.json",
    "extend.resume.files.run/recipe.yaml.history": "likewise",
    "extend.theta.files.run/rows.json": "where the rows are; which they are stands in the records of the run's steps",
    "extend-patterns.two stages.json.files": "a page with every sample lies beside the report",
    "data.pack one half.json": "a machine goes on with what is missing of the others' shares",
    "data.pack the other half.json.reused": "and the other one finds all rows",
}
"""Outputs that are others on purpose: where they begin, and why."""
NEW_KEYS = (
    "recipe.yaml.lift: nothing != []",
    ".first: nothing != []",
    ".lift: nothing != []",
    ".lifted: nothing != None",
    "router_aux_loss: nothing != 'config'",
    ".export: nothing != 'last'",
    ".messages_field: nothing != None",
    ".adapter: nothing != None",
    ".moments: nothing != 'keep'",
    ".readers: nothing != None",
    ".step_timeout: nothing != 3600",
    ".copy_to: nothing != None",
)
"""Keys that a recipe has gained, as a difference ends that is nothing but such a key at its default."""

COMMANDS = command_outputs.scenarios(command_outputs.CASES / "commands.yaml")


def unexpected(name, said):
    """Differences from before that nobody wanted."""
    found = differences_from_before("commands", name, said, RENAMED)
    return [each for each in found if not each.startswith(tuple(CHANGED)) and not each.endswith(NEW_KEYS)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_say_what_they_said(outputs_of):
    """All in one test: the libraries are imported once, which takes longer than most commands."""
    said = outputs_of("commands")
    assert said.keys() == {case.name for case in COMMANDS}
    assert {name: found for name in said if (found := unexpected(name, said[name]))} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_refused_as_it_was(outputs_of):
    refusals = outputs_of("refusals")["refusals"]
    before = command_outputs.read_kept("refusals")["refusals"]
    assert refusals.keys() == before.keys()
    for case, now in refusals.items():
        sentence = CHANGED_SENTENCES.get(case, before[case]["sentence"])
        assert (now["status"], now["stdout"], now["sentence"]) == (before[case]["status"], "", sentence), case


def test_a_number_a_key_and_a_type_that_change_are_found():
    before = {"a": [1, 2.0], "b": {"c": "x"}}
    for now in (
        {"a": [1, 2.1], "b": {"c": "x"}},
        {"a": [1, 2.0], "b": {}},
        {"a": [1.0, 2.0], "b": {"c": "x"}},
    ):
        assert len(list(command_outputs.differences(before, now, 1e-3))) == 1
    assert not list(command_outputs.differences(before, {"a": [1, 2.0001], "b": {"c": "x"}}, 1e-3))


def test_a_sentence_may_change_its_words_and_not_its_numbers():
    before = {"reasons": ["Its bound of 1,024 covers 0.5 of 2."], "status": "fits 2"}
    for now, others in (
        ({"reasons": ["The bound, 1,024, covers 0.5 of 2."], "status": "fits 2"}, 0),
        ({"reasons": ["Its bound of 1,025 covers 0.5 of 2."], "status": "fits 2"}, 1),
        ({"reasons": ["Its bound of 1,024 covers 0.5."], "status": "fits 2"}, 1),
        ({"reasons": ["Its bound of 1,024 covers 0.5 of 2."], "status": "suits 2"}, 1),
    ):
        found = command_outputs.differences(before, now)
        assert sum(not is_reworded(each) for each in found) == others


def test_numbers_that_change_places_change_what_is_kept():
    numbers = [float(number) for number in range(command_outputs.LONG + 1)]
    swapped = [*numbers[:3], numbers[4], numbers[3], *numbers[5:]]
    assert list(
        command_outputs.differences(
            command_outputs.condensed(numbers), command_outputs.condensed(swapped), 1e-6
        )
    )
