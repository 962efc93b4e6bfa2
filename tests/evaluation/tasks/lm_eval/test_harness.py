import logging
import socket
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness_cases import Parrot, harness_model, harness_tokenizer

pytest.importorskip("lm_eval")

import datasets
import huggingface_hub.constants
import lm_eval.api.task
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers.utils import logging as transformers_logging

from ropewalk.data.read.hub import hub_reachable, offline
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.tasks.lm_eval import catalogue as harness_tasks
from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue
from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel, cut, quiet_libraries
from ropewalk.rope import Default, RotaryEmbedding


@pytest.fixture(scope="module")
def tokenizer():
    return harness_tokenizer()


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 25), st.booleans())
def test_a_cut_prompt_keeps_its_ends_and_fills_the_room(ids, most, middle):
    kept = cut(ids, most, middle)
    assert len(kept) == min(len(ids), most)
    head = len(kept) // 2 if middle and len(ids) > most else 0
    if len(ids) <= most:
        assert kept == ids
    else:
        assert kept[:head] == ids[:head]
        assert kept[head:] == ids[len(ids) - (most - head) :]


def test_batches_equal_lm_evals_own_where_nothing_is_cut_in_the_middle(tokenizer):
    ours = HarnessModel(harness_model(), tokenizer, 64, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = HFLM(pretrained=harness_model(), tokenizer=harness_tokenizer(), max_length=64)
    texts = ["A short one", "one that is rather longer than the others", "<s>its own BOS"]
    for group, most in ((texts[:2], None), (texts[:2], 40), (texts[:2], 5), (texts[2:], 30)):
        (a, mask_a), (b, mask_b) = (
            each.tok_batch_encode(group, left_truncate_len=most) for each in (ours, theirs)
        )
        assert torch.equal(a, b)
        assert torch.equal(mask_a, mask_b)
    assert ours.truncated == {texts[0], texts[1]}


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", n, 1))
        for n, each in enumerate(arguments)
    ]


def test_what_lm_eval_calls_passes_through_the_wrapper(tokenizer):
    """The methods that are replaced are lm_eval's own affair; it must still call them, with such arguments."""
    parrot = Parrot(tokenizer, [])
    model = HarnessModel(parrot.eval(), tokenizer, 40, 3)
    model.middle = True
    told = []
    model.progress = lambda *counts: told.append(counts)
    prompts = [chr(97 + n) * (20 + 10 * n) for n in range(4)]
    settings = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.5, "top_p": 0.5}
    answers = model.generate_until(requests("generate_until", [(p, settings) for p in prompts]))
    assert answers == [" sailor 1"] * 4
    assert model.truncated == set(prompts[1:])
    expected = [cut(tokenizer(prompt)["input_ids"], 30, True) for prompt in prompts]
    assert sorted(parrot.read) == sorted(expected)
    assert told == [(n, 4) for n in range(1, 5)]
    assert not any(each["do_sample"] for each in parrot.asked)
    # Three prompts of at most 30 tokens, then the shortest of 21, with room for 10 more.
    assert [each["max_length"] for each in parrot.asked] == [40, 31]
    model.truncated.clear()
    model.loglikelihood(requests("loglikelihood", [("ab" * 20, " x"), ("ab", " x")]))
    assert model.truncated == {("ab" * 20, " x")}


def test_cached_keys_are_rotated_as_the_whole_answer_will_be(tokenizer):
    parrot = Parrot(tokenizer, []).eval()
    parrot.rotary = RotaryEmbedding(Default(8, 1e4))
    model = HarnessModel(parrot, tokenizer, 64, 1)
    lengths = []
    inner, forward = parrot.generate, parrot.forward
    parrot.generate = lambda **named: lengths.append(parrot.rotary.total_length) or inner(**named)
    parrot.forward = lambda ids: lengths.append(parrot.rotary.total_length) or forward(ids)
    model.generate_until(requests("generate_until", [("abcd", {"until": [], "max_gen_toks": 10})]))
    model.loglikelihood(requests("loglikelihood", [("abcd", " x")]))
    # BOS and four letters with ten new tokens; BOS, four letters and the space before the x.
    assert lengths == [15, 6]
    assert parrot.rotary.total_length is None


def test_an_answer_that_cannot_be_scored_ends_the_run(tokenizer):
    model = HarnessModel(harness_model(), tokenizer, 8, 1)
    for answer, length in (("", 0), ("123456789", 9)):
        with pytest.raises(RunFailure, match=f"an answer of {length} tokens cannot be scored"):
            model.loglikelihood(requests("loglikelihood", [("q", answer)]))


def test_the_tokenizer_gets_no_padding_token(tokenizer):
    model = HarnessModel(harness_model(), tokenizer, 8, 1)
    assert model.tokenizer.pad_token is not None
    assert tokenizer.pad_token is None


def test_known_tasks_are_found_without_a_search(monkeypatch):
    monkeypatch.setattr(harness_tasks, "_names_in_files", lambda: pytest.fail("all files were searched"))
    catalogue = Catalogue(("hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2", "longbench", "wikitext"))
    assert [t.name for t in catalogue.tasks_of("hellaswag")] == ["hellaswag"]
    assert len(catalogue.tasks_of("mmlu")) == 57
    assert len(catalogue.tasks_of("longbench")) == 21
    (arc,) = catalogue.tasks_of("arc_challenge")
    assert arc == harness_tasks.StockTask(
        "arc_challenge", "allenai/ai2_arc", "ARC-Challenge", ("train", "validation", "test"), "test", True
    )
    anatomy = catalogue.tasks_of("mmlu")[-1]
    assert anatomy.splits == ("test", "dev")


def test_names_are_found_wherever_they_lie():
    (task,) = Catalogue(("mmlu_flan_cot_zeroshot_anatomy",)).tasks_of("mmlu_flan_cot_zeroshot_anatomy")
    assert task.config == "anatomy"
    assert {t.name for t in Catalogue(("ai2_arc",)).tasks_of("ai2_arc")} == {"arc_challenge", "arc_easy"}


OWN = {
    "a": "task: own_a\ntag: own_tag\ndataset_path: json\ntest_split: test\n",
    "b": "task: own_b\ntag: own_tag\ndataset_path: json\nvalidation_split: validation\n",
    "inner": "group: own_inner\ntask: [own_tag]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n",
    "outer": (
        "group: own_outer\ntask:\n  - own_inner\n  - group: inline\n    task:\n      - task: own_a\n"
        "        dataset_name: other\n"
    ),
    "broken": "group: own_broken\ntask: [own_a, nowhere_at_all]\n",
}


@pytest.fixture
def own(tmp_path):
    for name, text in OWN.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_groups_tags_and_groups_in_groups_are_followed(own):
    catalogue = Catalogue(("own_outer", "own_tag"), own)
    tasks = catalogue.tasks_of("own_outer")
    assert [(task.name, task.config) for task in tasks] == [
        ("own_a", None),
        ("own_b", None),
        ("own_a", "other"),
    ]
    assert [task.evaluated for task in tasks] == ["test", "validation", "test"]
    assert not any(task.from_hub for task in tasks)


def test_an_index_that_lacks_a_member_is_not_complete(own):
    index = TaskManager(include_path=str(own), include_defaults=False).task_index
    assert harness_tasks._complete(index, "own_outer")
    assert not harness_tasks._complete(index, "own_broken")
    assert not harness_tasks._complete(index, "nowhere_at_all")


def test_the_users_data_leave_no_trace_in_the_catalogue():
    catalogue = Catalogue(("mmlu",))
    row = {"question": "Why?", "subject": "anatomy", "choices": list("wxyz"), "answer": 1}
    tasks, groups = catalogue.build("mmlu", {"mmlu_anatomy": {"test": [row], "dev": [row]}})
    assert list(tasks) == ["mmlu_anatomy"]
    assert [task.task_name for task in groups["mmlu"].get_all_tasks()] == ["mmlu_anatomy"]
    assert tasks["mmlu_anatomy"].task_docs[0] == row
    assert len(catalogue.tasks_of("mmlu")) == 57
    assert catalogue.tasks_of("mmlu")[0].from_hub


def test_a_folder_of_tasks_goes_before_lm_evals(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: hellaswag\ndataset_path: json\ntest_split: test\n")
    (task,) = Catalogue(("hellaswag",), tmp_path).tasks_of("hellaswag")
    assert task.dataset == "json"


@pytest.mark.parametrize("name", ["helaswag", "mmlu_anatomi", "qqqqqqqqqqqqqqqqqqqqqqqq"])
def test_an_unknown_task_is_refused_and_the_nearest_named(name):
    nearest = {"helaswag": "did you mean hellaswag", "mmlu_anatomi": "did you mean mmlu_anatomy"}
    with pytest.raises(
        RopewalkError, match=f"unknown lm_eval task '{name}'; {nearest.get(name, 'lm-eval ls')}"
    ):
        Catalogue((name,))


def test_a_hub_that_does_not_answer_is_given_up_quickly(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as silent:
        # It takes connections and never says a word.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(
            huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        assert not hub_reachable(0.2)
    # Nobody listens any more.
    assert not hub_reachable(0.2)


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_that_says_anything_is_there(monkeypatch, status):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert not hub_reachable()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        assert hub_reachable()


def test_offline_fails_at_once_and_ends(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with offline(), pytest.raises(ConnectionError, match="OfflineMode"):
        datasets.load_dataset("nobody/nothing-at-all")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_quiet_ends_and_hides_only_what_is_named(capfd):
    before = (logging.getLogger("lm_eval").level, transformers_logging.get_verbosity(), lm_eval.api.task.tqdm)
    with quiet_libraries():
        logging.getLogger("lm_eval.tasks").error("nobody is to see this")
        list(lm_eval.api.task.tqdm(range(3), total=3))
        warnings.warn("Using slow pure-python SequenceMatcher. And so on", UserWarning, stacklevel=1)
        with pytest.warns(UserWarning, match="anything else"):
            warnings.warn("anything else", UserWarning, stacklevel=1)
    after = (logging.getLogger("lm_eval").level, transformers_logging.get_verbosity(), lm_eval.api.task.tqdm)
    assert after == before
    assert capfd.readouterr() == ("", "")
