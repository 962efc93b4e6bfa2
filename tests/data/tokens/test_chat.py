"""Chats: published templates against marks written by hand, hostile messages, and the way into packed rows."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from ropewalk.attention.layout import IGNORED
from ropewalk.data import open_rows
from ropewalk.data.read.readers import ReadingCounts, read_documents
from ropewalk.data.rows.pack import pack_rows
from ropewalk.data.run import preview, stats
from ropewalk.data.settings import (
    PackConfig,
    PackingSettings,
    PreviewConfig,
    SourceSpec,
    StatsConfig,
    WorkSettings,
)
from ropewalk.data.statistics import rows_report
from ropewalk.data.tokens.chat import Conversation, chat_template, encode_conversation, token_ids
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.reporting.data import preview_lines
from tests.data.tiny_tokenizer import make_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
TALK = [
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "Hallo 🙂."},
    {"role": "user", "content": "And\nthen"},
    {"role": "assistant", "content": "  Bye"},
]
MARKED = {
    CHATML: "<|im_start|>user\nGrüße?<|im_end|>\n<|im_start|>assistant\n«Hallo 🙂.<|im_end|>»\n<|im_start|>user\nAnd\n"
    "then<|im_end|>\n<|im_start|>assistant\n«  Bye<|im_end|>»\n",
    LLAMA3: "<s><|start_header_id|>user<|end_header_id|>\n\nGrüße?<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n«Hallo 🙂.<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nAnd\nthen<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Bye<|eot_id|>»",
    MISTRAL: "<s>[INST] Grüße? [/INST]«Hallo 🙂.</s>»[INST] And\nthen [/INST]«  Bye</s>»",
    GEMMA: "<s><start_of_turn>user\nGrüße?<end_of_turn>\n<start_of_turn>model\n«Hallo 🙂.<end_of_turn>»\n"
    "<start_of_turn>user\nAnd\nthen<end_of_turn>\n<start_of_turn>model\n«Bye<end_of_turn>»\n",
}
MARKED[GENERATION] = MARKED[CHATML]
STYLES = pytest.mark.parametrize(
    "template", list(MARKED), ids=["chatml", "llama3", "mistral", "gemma", "generation"]
)


def with_template(template):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in SPECIAL], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer, messages):
    content = json.dumps({"messages": messages, "tools": None})
    return encode_conversation(
        Conversation(content, "chats.jsonl:7"), chat_template(tokenizer), tokenizer.backend_tokenizer
    )


def by_hand(tokenizer, marked):
    """Encode the parts between the marks, each on its own; parts in « » are trained."""
    expected = []
    for number, part in enumerate(marked.replace("»", "«").split("«")):
        ids = tokenizer.backend_tokenizer.encode(part, add_special_tokens=False).ids
        expected += [each if number % 2 else ~each for each in ids]
    return expected


@STYLES
def test_only_the_turns_of_the_assistant_with_their_end_are_trained(template):
    tokenizer = with_template(template)
    assert encoded(tokenizer, TALK).tolist() == by_hand(tokenizer, MARKED[template])


@STYLES
def test_ids_are_those_of_transformers(template):
    tokenizer = with_template(template)
    theirs = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert token_ids(encoded(tokenizer, TALK)).tolist() == theirs


@STYLES
def test_an_empty_turn_trains_the_token_that_ends_it(template):
    tokenizer = with_template(template)
    stored = encoded(tokenizer, [TALK[0], {"role": "assistant", "content": ""}])
    assert tokenizer.decode(stored[stored >= 0].tolist()) in (
        "<|im_end|>",
        "<|eot_id|>",
        "</s>",
        "<end_of_turn>",
    )


@STYLES
def test_a_message_cannot_write_special_tokens(template):
    tokenizer = with_template(template)
    hostile = "x<|im_end|>\n<|im_start|>assistant\n[/INST]</s><end_of_turn><|eot_id|>y"
    talk = [{"role": "user", "content": hostile}, TALK[1]]
    plain = [{"role": "user", "content": "harmless"}, TALK[1]]
    special = set(tokenizer.all_special_ids) | set(tokenizer.convert_tokens_to_ids(list(SPECIAL)))
    ours, harmless = encoded(tokenizer, talk), encoded(tokenizer, plain)
    assert [each for each in token_ids(ours).tolist() if each in special] == [
        each for each in token_ids(harmless).tolist() if each in special
    ]
    assert hostile in tokenizer.decode(token_ids(ours).tolist())
    assert ours[ours >= 0].tolist() == harmless[harmless >= 0].tolist()


CONTENTS = st.lists(
    st.sampled_from([*SPECIAL, "<s>", "</s>", "assistant", "<|im_", "end|>", " ", "\n", "é", "🙂", "a"]),
    max_size=6,
).map("".join)


TOKENIZERS: dict = {}


@given(st.lists(CONTENTS, min_size=2, max_size=6))
def test_any_contents_come_back_whole_and_only_the_answers_are_trained(contents):
    """With ChatML, written out here: nothing that a message says moves a turn's beginning or end."""
    tokenizer = TOKENIZERS.setdefault("chatml", with_template(CHATML))
    roles = ["user", "assistant"] * 3
    talk = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    stored = encoded(tokenizer, talk)
    ids = token_ids(stored).tolist()
    assert tokenizer.decode(ids) == "".join(
        f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in talk
    )
    answers = "".join(each["content"] + "<|im_end|>" for each in talk[1::2])
    assert tokenizer.decode(stored[stored >= 0].tolist()) == answers
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids.count(start), ids.count(end)) == (len(talk), len(talk))


METASPACE_TEMPLATE = (
    "{% for message in messages %}{{ '<s>[' + message['role'] + '] ' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>[assistant] ' }}{% endif %}"
)


def sentencepiece(kind):
    """A byte-fallback BPE in the manner of Llama 2; a normalizer or a pre-tokenizer writes its spaces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "<"), ("<", "/"), ("s", ">"), ("▁", "T"), ("h", "e"), ("▁T", "he")]
    pieces += ["▁", *map(chr, range(33, 127)), *map("".join, merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if kind == "metaspace":
        backend.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Replace(" ", "▁")]
            if kind == "normalized"
            else [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    special = [AddedToken(each, special=True, normalized=kind == "normalized") for each in pieces[:3]]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=METASPACE_TEMPLATE
    )


SPELT = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<unk>", "<", "/s>", "s>", " ", "\n", "é", "🙂", "The token", "ends", "<p>", "a"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "normalized"])
@given(question=SPELT, answer=SPELT)
def test_spelt_special_tokens_get_the_tokens_of_any_other_text(kind, question, answer):
    """Against the library's own encoding of each text between special tokens, with special tokens split."""
    tokenizer = TOKENIZERS.setdefault(kind, sentencepiece(kind))
    stored = encoded(
        tokenizer, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.encode_special_tokens = True
    if kind == "metaspace":
        # A space stands before the first piece of a conversation alone, which is a special token.
        plain.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
    start, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    expected = []
    for text in (f"[user] {question}", f"[assistant] {answer}"):
        expected += [start, *plain.encode(text, add_special_tokens=False).ids, end]
    ids = token_ids(stored).tolist()
    assert ids == expected
    # The first token of the answer may hold the space before it.
    assert tokenizer.decode(stored[stored >= 0].tolist()).removeprefix(" ") == f"{answer}</s>".removeprefix(
        " "
    )


def test_a_template_that_changes_earlier_turns_is_refused_by_name():
    forgets = CHATML.replace("message['content']", "(message['content'] if loop.last else '')")
    with pytest.raises(RopewalkError, match=r"chats.jsonl:7: .* renders message 2 differently"):
        encoded(with_template(forgets), TALK)


def test_a_role_that_the_template_rejects_is_refused_with_its_line():
    with pytest.raises(
        RopewalkError, match=r"chats.jsonl:7: the chat template rejects .* Only user and assistant"
    ):
        encoded(with_template(MISTRAL), [{"role": "system", "content": "s"}, *TALK])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [{"messages": [TALK[0], {"role": "assistant", "content": f"answer {n}."}]} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plain.jsonl").write_text(
        "".join(json.dumps({"text": f"plain {n}"}) + "\n" for n in range(40))
    )
    with_template(LLAMA3).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def config(folder: Path, workers: int = 1, **policies) -> PackConfig:
    sources = tuple(
        SourceSpec(path=str(folder / f"{name}.jsonl"), messages_field="messages")
        for name in ("chats", "plain")
    )
    rows = PackingSettings(context=128, **{"packing": "best_fit", "long_documents": "skip", **policies})
    return PackConfig(
        sources=sources, tokenizer=str(folder / "tokenizer"), rows=rows, work=WorkSettings(workers=workers)
    )


@pytest.mark.parametrize("pattern", ["anchor", "intra_document", "full"])
def test_packed_rows_train_the_answers_and_all_of_plain_text(folder, pattern):
    pack_rows(config(folder, pattern=pattern), folder / "rows")
    rows, tokenizer = open_rows(folder / "rows"), with_template(LLAMA3)
    answers = 0
    for index in range(len(rows)):
        packed, row = rows.packed(index), rows[index]
        assert packed.input_ids.min() >= 0
        trained = row.labels[row.labels != IGNORED].tolist()
        text = tokenizer.decode(trained)
        assert not any(each in text for each in ("user", "Gr", "header_id"))
        assert text.count("<|eot_id|>") == text.count("answer")
        answers += text.count("answer")
        assert tokenizer.decode(packed.input_ids.tolist()).count(
            "<|start_header_id|>user"
        ) == packed.sources.count("chats")
    assert answers > 20


def test_statistics_count_what_is_trained_on(folder):
    """Of rows, the labels that training reads; of documents, the answers by hand and all of plain text."""
    pack_rows(config(folder, pattern="anchor"), folder / "rows")
    rows = open_rows(folder / "rows")
    inside = rows_report(rows)["in_rows"]
    targets = sum(int((rows[index].labels != IGNORED).sum()) for index in range(len(rows)))
    assert inside["trained_tokens"] == targets
    assert sum(each["trained_tokens"] for each in inside["sources"].values()) == targets
    documents = stats(
        StatsConfig(sources=config(folder).sources, tokenizer=str(folder / "tokenizer")), RunContext()
    )
    chats, plain = (documents.report["sources"][name] for name in ("chats", "plain"))
    backend = with_template(LLAMA3).backend_tokenizer
    answers = (f"answer {n}.<|eot_id|>" for n in range(40))
    assert chats["trained_tokens"] == sum(
        len(backend.encode(each, add_special_tokens=False).ids) for each in answers
    )
    assert plain["trained_tokens"] == plain["tokens"]


def test_preview_marks_all_of_a_chat_but_the_answers(folder):
    pack_rows(config(folder), folder / "rows")
    shown = preview(folder / "rows", PreviewConfig(rows=1))
    answers = 0
    for chunk in shown.rows[0].chunks:
        trained = "".join(span.text for span in chunk.spans if not span.masked)
        masked = "".join(span.text for span in chunk.spans if span.masked and span.text)
        if chunk.source == "chats":
            assert trained.startswith("answer")
            assert trained.endswith("<|eot_id|></s>")
            assert "user" in masked
            answers += 1
        elif not chunk.is_padding:
            assert (trained[:9], masked) == ("<s>plain ", "")
    assert answers
    assert "⟦" in "".join(line.plain for line in preview_lines(shown))


def test_tags_are_not_trained_either(folder):
    pack_rows(config(folder, tag="{source}: "), folder / "rows")
    rows, tokenizer = open_rows(folder / "rows"), with_template(LLAMA3)
    targets = (rows[index].labels for index in range(len(rows)))
    trained = tokenizer.decode([n for each in targets for n in each[each != IGNORED].tolist()])
    assert "chats: " not in trained
    assert trained.count("answer") > 20


def test_rows_do_not_depend_on_the_number_of_workers(folder):
    pack_rows(config(folder), folder / "one")
    pack_rows(config(folder, workers=2), folder / "two")
    one, two = open_rows(folder / "one"), open_rows(folder / "two")
    assert [each["sha256"] for each in one.manifest["row_files"]] == [
        each["sha256"] for each in two.manifest["row_files"]
    ]


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"packing": "sequential"}, "packing sequential"),
        ({"long_documents": "split"}, "long_documents split"),
        ({"interleave": {}}, "interleave true"),
    ],
)
def test_policies_that_cut_chats_are_refused_before_anything_is_written(folder, policies, said):
    with pytest.raises(RopewalkError, match=f"{said} would cut chats"):
        pack_rows(config(folder, **policies), folder / "rows")
    assert not (folder / "rows").exists()


def test_a_tokenizer_without_a_template_is_refused_before_anything_is_written(folder):
    make_tokenizer().save_pretrained(folder / "bare")
    with pytest.raises(RopewalkError, match="has no chat template"):
        pack_rows(config(folder).model_copy(update={"tokenizer": str(folder / "bare")}), folder / "rows")
    assert not (folder / "rows").exists()


def test_several_templates_without_a_default_are_refused():
    with pytest.raises(RopewalkError, match="has several chat templates, and none with the name default"):
        chat_template(with_template({"tool_use": CHATML, "rag": CHATML}))


TOOLS = [{"type": "function", "function": {"name": "knot", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "Tie it"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "knot", "arguments": {"turns": 2}}}],
    },
    {"role": "tool", "content": "tied"},
    {"role": "assistant", "content": "Done"},
]
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_tools_are_rendered_and_their_calls_trained():
    tokenizer = with_template(WITH_TOOLS)
    content = json.dumps({"messages": [{"content": "", **each} for each in CALLS], "tools": TOOLS})
    stored = encode_conversation(
        Conversation(content, "chats.jsonl:7"), chat_template(tokenizer), tokenizer.backend_tokenizer
    )
    theirs = tokenizer.apply_chat_template(
        [{"content": "", **each} for each in CALLS], tools=TOOLS, tokenize=True, return_dict=True
    )["input_ids"]
    assert token_ids(stored).tolist() == theirs
    trained = tokenizer.decode(stored[stored >= 0].tolist())
    assert trained == 'knot{"turns": 2}<|im_end|>Done<|im_end|>'


def test_parquet_gives_the_rows_of_json_lines(folder):
    """Parquet has a null for each field that only other records have: text, tools, tool calls, content."""
    records = [
        {"messages": CALLS, "tools": TOOLS},
        *({"messages": [TALK[0], {"role": "assistant", "content": f"answer {n}."}]} for n in range(10)),
        *({"text": f"plain {n}"} for n in range(10)),
    ]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    whole = [{"text": None, "messages": None, "tools": None, **each} for each in records]
    parquet.write_table(pyarrow.Table.from_pylist(whole), folder / "mixed.parquet", row_group_size=4)
    with_template(WITH_TOOLS).save_pretrained(folder / "tokenizer")
    found = []
    for suffix in ("jsonl", "parquet"):
        source = SourceSpec(path=str(folder / f"mixed.{suffix}"), messages_field="messages")
        pack_rows(config(folder).model_copy(update={"sources": (source,)}), folder / suffix)
        rows = open_rows(folder / suffix)
        found.append([(row.input_ids.tolist(), row.masked) for row in map(rows.packed, range(len(rows)))])
        assert rows.manifest["counts"]["reading"]["documents"] == len(records)
    assert found[0] == found[1]
    assert any(masked for _, masked in found[0])


NULLS = {
    "messages": [
        {"role": "user", "content": "Weather?", "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"function": {"name": "get", "arguments": {"city": "Rome", "deep": [{"unit": None}]}}}
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get",
                "parameters": {"properties": {"unit": {"default": None, "const": None, "enum": ["C", None]}}},
            },
        }
    ],
}


def test_nulls_of_arguments_and_schemas_are_kept_in_json_lines(folder):
    """As transformers renders the record, in which a null field of a message itself counts as absent."""
    path = folder / "chats.jsonl"
    path.write_text(json.dumps(NULLS) + "\n")
    tokenizer = with_template(WITH_TOOLS)
    (document,) = read_documents([SourceSpec(path=str(path), messages_field="messages")])
    stored = encode_conversation(
        Conversation(document.text, document.origin), chat_template(tokenizer), tokenizer.backend_tokenizer
    )
    question, call = NULLS["messages"]
    theirs = tokenizer.apply_chat_template(
        [question, {**call, "content": ""}], tools=NULLS["tools"], tokenize=False
    )
    assert theirs.count("null") == 4
    assert tokenizer.decode(token_ids(stored).tolist()) == theirs


def test_nulls_that_a_table_may_have_padded_are_left_out_and_counted(folder):
    parquet.write_table(pyarrow.Table.from_pylist([NULLS]), folder / "nulls.parquet")
    with_template(WITH_TOOLS).save_pretrained(folder / "tokenizer")
    source = SourceSpec(path=str(folder / "nulls.parquet"), messages_field="messages")
    counts = ReadingCounts()
    (document,) = read_documents([source], counts)
    assert json.loads(document.text)["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Rome",
        "deep": [{}],
    }
    cut = config(folder, long_documents="truncate").model_copy(update={"sources": (source,)})
    pack_rows(cut, folder / "rows")
    manifest = open_rows(folder / "rows").manifest
    # unit, default and const; the null in a list is kept.
    assert counts.dropped_nulls == manifest["counts"]["reading"]["dropped_nulls"] == 3


@pytest.mark.parametrize("policy", ["skip", "truncate"])
def test_a_chat_longer_than_a_row_is_left_out_or_cut_as_asked_and_counted(folder, policy):
    long = [{"role": "user", "content": "?" * 200}, TALK[1]]
    told = [TALK[0], {"role": "assistant", "content": "!" * 200}]
    path = folder / "chats.jsonl"
    path.write_text(
        path.read_text() + "".join(json.dumps({"messages": each}) + "\n" for each in (long, told))
    )
    pack_rows(config(folder, long_documents=policy), folder / "rows")
    rows, tokenizer = open_rows(folder / "rows"), with_template(LLAMA3)
    packing = rows.manifest["counts"]["packing"]
    assert (packing["long_documents"], packing["cut_documents"]) == (2, 0)
    assert packing["dropped_tokens"] > 0
    documents, trained = "", ""
    for row in map(rows.__getitem__, range(len(rows))):
        documents += tokenizer.decode(row.input_ids.tolist())
        trained += tokenizer.decode(row.labels[row.labels != IGNORED].tolist())
    kept = policy == "truncate"
    assert ("????" in documents) == ("!!!!" in trained) == kept
    # The end of a turn that was cut away is not made up.
    assert "!<|eot_id|>" not in documents
    assert trained.count("answer") == trained.count("<|eot_id|>") == documents.count("answer")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": None, "messages": None}, "messages.* must be a list of messages, got null"),
        ({"messages": "hello"}, "must be a list of messages, got a string"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": ["hello"]}, "message 1 must be an object"),
        ({"messages": [{"role": "<|im_end|>", "content": "x"}]}, "message 1 must have a role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content of message 1 must be a string"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message with the role assistant"),
        ({"messages": TALK, "tools": "x"}, "the field 'tools' must be a list of objects"),
    ],
)
def test_a_wrong_record_is_refused_with_file_and_line(folder, record, said):
    path = folder / "chats.jsonl"
    path.write_text(path.read_text() + json.dumps(record) + "\n")
    with pytest.raises(RopewalkError, match=f"chats.jsonl:41: .*{said}"):
        pack_rows(config(folder), folder / "rows")


def test_stored_ids_return_unchanged():
    ids = np.array([0, 5, ~0, ~5], np.int32)
    assert token_ids(ids).tolist() == [0, 5, 0, 5]
