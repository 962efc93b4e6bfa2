"""Functions are found by name, and what they return is recognised or refused by name."""

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.verification.settings import TrainerProbeSettings
from ropewalk.verification.trainers.target import load_function, make_documents, make_subject


@pytest.mark.parametrize("count", [2, 3, 6, 8, 9])
def test_no_token_id_occurs_twice_and_lengths_differ(count):
    documents = make_documents(TrainerProbeSettings(target="here", documents=count, length=24))
    tokens = [token for each in documents for token in each]
    assert len(documents) == count
    assert len(set(tokens)) == len(tokens)
    assert len({len(each) for each in documents}) == count
    assert max(map(len, documents)) == 24


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", "must be module:function or file.py:function"),
        ("absent.py:make", "TARGET names the file absent.py, which does not exist"),
        ("no_such_module_here:make", "cannot import no_such_module_here: ModuleNotFoundError"),
        ("json:absent", "json has no function absent; it has "),
    ],
)
def test_a_target_that_cannot_be_found_is_refused(target, words):
    with pytest.raises(RopewalkError, match=words):
        load_function(target)


def test_a_file_is_imported(tmp_path):
    (tmp_path / "mine_to_probe.py").write_text("def make():\n    return 3\n")
    assert load_function(f"{tmp_path}/mine_to_probe.py:make")() == 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 3, "TARGET returned a value of type int .* return one of: a transformers Trainer"),
        (lambda documents: [1.0], "TARGET returned a value of type list"),
        (lambda first, second: 3, "it takes 2 arguments: first, second"),
        (lambda: {}["key"], "TARGET failed: KeyError"),
    ],
)
def test_what_cannot_be_probed_is_refused(function, words):
    with pytest.raises(RopewalkError, match=words):
        make_subject(function, ((1, 2), (3,)))


def test_losses_are_one_for_each_document_or_one_list_each():
    for made in (torch.tensor([1.0, 2.0]), [1.0, 2.0], [torch.ones(3), [1.0]]):
        subject = make_subject(lambda documents, made=made: made, ((1, 2), (3,)))
        assert subject.losses is not None
        assert len(subject.losses(((1, 2), (3,)))) == 2
