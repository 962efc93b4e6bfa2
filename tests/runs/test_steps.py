"""What the body of a step may do in the folder of its run."""

import json

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.parallel import World
from ropewalk.runs import Runner, Step, Work, opened
from tests.runs.job_cases import NUMBERS, Job


def test_a_file_is_registered_before_it_is_written(tmp_path):
    def body(work: Work):
        path = work.file("sub/a.json")
        assert json.loads((tmp_path / "steps/only.json").read_text())["files"] == ["sub/a.json"]
        work.kept("b.jsonl")
        assert json.loads((tmp_path / "steps/only.json").read_text())["kept"] == ["b.jsonl"]
        path.parent.mkdir()
        path.write_text("a")

    with opened(tmp_path, "toy", World()) as store:
        Runner(store, World()).run([Step("only", dict, (), body)])
    record = json.loads((tmp_path / "steps/only.json").read_text())
    assert list(record["done"]["digests"]) == ["sub/a.json"]
    assert record["done"]["digests"]["sub/a.json"]["bytes"] == 1


def test_a_folder_is_digested_file_by_file(tmp_path):
    def body(work: Work):
        for name in ("model/a.bin", "model/deep/b.bin"):
            path = work.file("model").parent / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(name)

    def run():
        with opened(tmp_path, "toy", World()) as store:
            steps = [Step("model", dict, (), body)]
            return Runner(store, World()).survey(steps).found["model"].state, Runner(store, World()).run(
                steps
            )

    run()
    (tmp_path / "model/deep/b.bin").write_text("model/deep/c.bin")
    assert run()[0] == "damaged"
    assert run()[0] == "done"


def test_a_name_outside_the_folder_is_our_mistake(tmp_path):
    step = Step("only", dict, (), lambda work: work.file("../a"))
    with pytest.raises(AssertionError), opened(tmp_path / "run", "toy", World()) as store:
        Runner(store, World()).run([step])


def test_the_body_knows_its_inputs_and_whether_it_goes_on(tmp_path):
    seen = []

    def body(work: Work):
        seen.append((work.resumed, dict(work.inputs)))
        if len(seen) == 1:
            raise RopewalkError("once")

    job = Job(tmp_path / "run")
    steps = [*job.list(), Step("last", dict, ("table", "after"), body)]
    for _ in range(2):
        try:
            with opened(job.folder, "toy", World()) as store:
                Runner(store, World()).run(steps)
        except RopewalkError:
            pass
    assert seen == [(again, {"table": {"sum": 3}, "after": 18}) for again in (False, True)]


def test_a_log_of_a_run_without_a_folder_is_in_memory():
    def body(work: Work):
        log = work.log("a.jsonl", NUMBERS)
        log.add((1, 1))
        return len(log.known)

    with opened(None, "toy", World()) as store:
        assert Runner(store, World()).run([Step("only", dict, (), body)]) == {"only": 1}
