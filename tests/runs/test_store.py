"""What the records of a folder say, who may open it, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.parallel import World
from ropewalk.runs import Runner, Step, opened
from ropewalk.runs.store import SMALL, launch
from tests.runs.job_cases import Job, contents


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "run")
    job.run()
    job.calls.clear()
    return job


def test_locking_alone_leaves_nothing_behind(tmp_path):
    with opened(tmp_path / "run", "toy", World()):
        assert [each.name for each in (tmp_path / "run").iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_must_must_not_or_may_exist(tmp_path, job):
    with pytest.raises(
        RopewalkError, match=r"nothing to resume: .* contains no toy; omit --resume to start one"
    ):
        Job(tmp_path / "none").run(resume=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(
        RopewalkError, match="already contains a toy; either resume this toy with --resume, or give"
    ):
        job.run(resume=False)
    for resume in (True, None):
        job.run(resume=resume)
    assert job.calls == []
    Job(tmp_path / "none").run(resume=False)


def test_a_restart_resumes_what_its_own_launch_began(job, monkeypatch):
    restarted = replace(World(), restarts=1)
    job.world = restarted
    job.run(resume=False)
    assert json.loads((job.folder / "run.json").read_text())["launch"] == launch()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(RopewalkError, match="already contains a toy"):
        job.run(resume=False)
    # Whoever resumes it becomes its launch, as soon as a step begins.
    Job(job.folder, metric="max").run(resume=True)
    job.metric = "max"
    job.run(resume=False)


def test_a_run_keeps_its_identity_and_shares_it_with_its_copies_alone(job, tmp_path):
    def identity(folder):
        return json.loads((folder / "run.json").read_text())["id"]

    drawn = identity(job.folder)
    copied = Job(shutil.copytree(job.folder, tmp_path / "copied"), metric="max")
    copied.run(resume=True)
    assert identity(copied.folder) == drawn
    assert copied.calls == ["after"]
    Job(tmp_path / "other").run()
    assert identity(tmp_path / "other") != drawn


def test_a_folder_of_something_else_is_refused_in_one_sentence(tmp_path):
    for name, text, said in (
        ("notes.txt", "mine", "is not empty and contains no toy; give another --out"),
        ("run.json", '{"format": 1, "seed": 3}', "was written by another version of ropewalk"),
        ("run.json", '{"format": 2, "holds": "toy"}', "was written by another version of ropewalk"),
        ("run.json", '{"format": 1, "holds": "grid"}', "holds a grid, not a toy; give another --out"),
        (
            "run.json",
            '{"format": 1, "holds": "toy", "history": 1}',
            "is damaged: history must be a list, got 1",
        ),
        ("run.json", "{", "is damaged"),
    ):
        folder = tmp_path / said[:9] / str(len(text))
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        with pytest.raises(RopewalkError, match=said):
            Job(folder).run()
        assert [each.name for each in folder.iterdir()] == [name]


def test_two_processes_do_not_write_at_once(job):
    program = (
        "import sys; from pathlib import Path; from tests.runs.job_cases import Job\n"
        "try: Job(Path(sys.argv[1]), metric='max').run()\n"
        "except ValueError as error: print(error)"
    )
    with opened(job.folder, "toy", World()):
        other = subprocess.run(
            [sys.executable, "-c", program, str(job.folder)], capture_output=True, text=True
        )
    assert f"process {os.getpid()} on " in other.stdout
    assert "is writing to" in other.stdout
    assert json.loads((job.folder / "steps/after.json").read_text())["identity"] == {"metric": "mean"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is damaged: .*; restore the file, or delete it to make its step again"),
        ("[]", "is damaged: it is not a JSON object"),
        (
            "{}",
            "is damaged: identity is missing; inputs is missing; restore the file, or delete it",
        ),
    ],
)
def test_a_damaged_record_is_named(job, text, said):
    (job.folder / "steps/table.json").write_text(text)
    with pytest.raises(RopewalkError, match=rf"steps/table\.json {said}"):
        job.run()
    (job.folder / "steps/table.json").unlink()
    job.run()
    # Made again from its log, with the same result.
    assert job.calls == []


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "..\\a", None, "out/a"])
@pytest.mark.parametrize("place", ["files", "kept", "digests", "aside"])
def test_a_record_that_names_a_file_outside_is_refused(job, name, place):
    (job.folder / "out").symlink_to(job.folder.parent)
    path = job.folder / "steps/table.json"
    values = json.loads(path.read_text())
    if place == "digests":
        values["done"]["digests"] = {name or "": {"bytes": 1, "sha256": ""}}
    elif place == "aside":
        values["aside"] = name or ""
    else:
        values[place] = [name]
    path.write_text(json.dumps(values))
    with pytest.raises(
        RopewalkError,
        match=r"table\.json (lists the file .*, but may list only files in|is damaged: .* must be a string, got None)",
    ):
        job.run()


def test_small_files_are_hashed_and_of_large_ones_the_size_is_compared(job, tmp_path):
    for size, noticed in ((SMALL, True), (SMALL + 1, False)):
        folder = tmp_path / str(size)

        def body(work, size=size):
            work.file("a").write_bytes(b"\0" * size)

        steps = [Step("only", dict, (), body)]
        with opened(folder, "toy", World()) as store:
            Runner(store, World()).run(steps)
            (folder / "a").write_bytes(b"\1" * size)
            assert (store.survey(steps).found["only"].state == "damaged") == noticed
            assert store.survey(steps, deep=True).found["only"].state == "damaged"
            (folder / "a").write_bytes(b"\0" * (size - 1))
            assert store.survey(steps).found["only"].state == "damaged"


def test_a_list_may_grow_at_its_end(tmp_path):
    made = []

    def run(values):
        step = Step("grid", dict, (), lambda work: made.append(list(values)), goal=values, precious=True)
        with opened(tmp_path / "run", "grid", World()) as store:
            Runner(store, World()).run([step])

    for values in ([1, 2], [1, 2], [1, 2, 3]):
        run(values)
    assert made == [[1, 2], [1, 2, 3]]
    with pytest.raises(
        RopewalkError, match=r"which differs in goal \(\[1, 2, 3\] in the folder, \[1, 2\] given\)"
    ):
        run([1, 2])
    with pytest.raises(
        RopewalkError, match=r"which differs in goal \(\[1, 2, 3\] in the folder, \[2, 1\] given\)"
    ):
        run([2, 1])


def test_several_lists_may_grow_each_at_its_end(tmp_path):
    made = []

    def run(**goal):
        step = Step("grid", dict, (), lambda work: made.append(goal), goal=goal, precious=True)
        with opened(tmp_path / "run", "grid", World()) as store:
            Runner(store, World()).run([step])

    for goal in (
        {"a": [1], "b": [2]},
        {"a": [1], "b": [2]},
        {"a": [1], "b": [2, 3]},
        {"a": [1, 4], "b": [2, 3]},
    ):
        run(**goal)
    assert len(made) == 3
    with pytest.raises(RopewalkError, match=r"which differs in b \(\[2, 3\] in the folder, \[2\] given\)"):
        run(a=[1, 4], b=[2])
    with pytest.raises(
        RopewalkError, match=r"which differs in goal\.b \(\[2, 3\] in the folder, none given\)"
    ):
        run(a=[1, 4])


def test_the_steps_that_use_a_result_are_made_again_with_it(job):
    before = contents(job.folder)
    job.run(again="train")
    assert job.calls == ["step 1", "step 2", "step 3", "after"]
    after = contents(job.folder)
    assert {name: after[name] for name in before} == before
    assert (job.folder / "earlier/train/checkpoints/step-3.json").is_file()


def test_a_log_of_two_steps_moves_with_the_last_of_them(tmp_path):
    def run(one, two):
        def body(work):
            with work.kept("both.jsonl").open("a") as file:
                file.write("x")

        steps = [Step("one", lambda: {"n": one}, (), body), Step("two", lambda: {"n": two}, (), body)]
        with opened(tmp_path / "run", "toy", World()) as store:
            Runner(store, World()).run(steps)

    run(1, 1)
    run(2, 1)
    assert (tmp_path / "run/both.jsonl").read_text() == "xxx"
    run(3, 2)
    assert (tmp_path / "run/both.jsonl").is_file()


def test_a_change_of_settings_is_a_line_of_the_history_once(tmp_path):
    def run(changes):
        job = Job(tmp_path / "run")
        with opened(job.folder, "toy", World()) as store:
            store.note_changes(changes)
            Runner(store, World()).run(job.list())
        return json.loads((tmp_path / "run/run.json").read_text())["history"]

    first, second = {"key": "rate", "old": 1, "new": 2}, {"key": "rate", "old": 2, "new": 3}
    assert run([]) == []
    assert run([first]) == [first]
    # As of a process that was killed before it could take note of it elsewhere too.
    assert run([first]) == [first]
    assert run([second]) == [first, second]
    assert run([]) == [first, second]


def test_what_a_step_had_is_known_to_whoever_goes_on_with_it(tmp_path):
    had = []

    def run(goal, cut_off=False):
        def body(work):
            had.append(work.before)
            if cut_off:
                raise InterruptedError
            return goal

        with opened(tmp_path / "run", "toy", World()) as store:
            Runner(store, World()).run([Step("one", dict, (), body, goal=goal)])

    run([1])
    with pytest.raises(InterruptedError):
        run([1, 2], cut_off=True)
    run([1, 2])
    run([1, 2])
    assert had == [None, [1], [1]]


def test_an_intended_change_renews_the_digests(job):
    with opened(job.folder, "toy", World()) as store:
        (job.folder / "after.json").write_text('"changed"')
        store.renew("after", 20)
    again = Job(job.folder)
    assert again.run()["after"] == 20
    assert (again.calls, again.notes) == ([], [])


def test_what_a_killed_process_left_is_removed(job):
    left = [job.folder / f"{place}.a.{'0' * 32}.json" for place in ("", "steps/", "data/")]
    for path in left:
        path.write_text("")
    job.run()
    assert not any(path.exists() for path in left)
