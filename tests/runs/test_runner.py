"""A run goes on after a kill at any write as if there had been none, and does only what is not done."""

import json
import shutil
from dataclasses import replace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.io.files import write_json
from ropewalk.parallel import World
from ropewalk.runs import Runner, Step, opened
from tests.disk_cases import files_no_larger_than
from tests.marks import slow_after
from tests.runs.job_cases import Job, contents, left_by_kills


@pytest.fixture
def whole(tmp_path):
    """A finished job's folder."""
    job = Job(tmp_path / "whole")
    job.run()
    return job.folder


def test_a_job_runs_once(whole):
    job = Job(whole)
    before = contents(whole)
    assert job.run()["after"] == 18
    assert (job.calls, job.notes) == ([], [])
    assert contents(whole) == before


def test_a_run_without_a_folder_runs_every_step():
    for _ in range(2):
        job = Job(None)
        assert job.run()["after"] == 18
        assert job.calls[0] == "rows"
        assert job.calls[-1] == "after"


def test_a_run_that_is_killed_at_any_write_ends_as_one_that_is_not(tmp_path):
    unbroken = Job(tmp_path / "unbroken")
    kills = list(left_by_kills(unbroken.folder, tmp_path / "kills", unbroken.run))
    wanted = contents(unbroken.folder)
    for folder in kills:
        job = Job(folder)
        job.run()
        assert contents(folder) == wanted, folder
        # What is on the disk is not made again.
        assert len(job.calls) <= 9
    assert len(kills) > 40


CHANGES = [
    ({"metric": "max"}, None),
    ({"steps": 5}, None),
    ({"scale": 2}, "table"),
    ({}, "rows"),
    ({"data": "b", "metric": "max"}, "rows"),
]


@pytest.mark.parametrize(("change", "again"), slow_after(3, CHANGES))
def test_a_change_that_is_killed_at_any_write_ends_as_one_that_is_not(whole, tmp_path, change, again):
    kills = list(left_by_kills(whole, tmp_path / "kills", lambda: Job(whole, **change).run(again)))
    wanted = _but_earlier(contents(whole))
    for folder in kills:
        # The same command once more. Once all is marked for moving, it need not ask again.
        moved = {name for name in contents(folder) if name.startswith("earlier")}
        Job(folder, **change).run(None if again is None or _is_marked(folder, again) else again)
        found = contents(folder)
        assert _but_earlier(found) == wanted, folder
        assert moved <= found.keys()
    assert len(kills) > 3


def _but_earlier(found):
    return {name: text for name, text in found.items() if not name.startswith("earlier")}


def _is_marked(folder, name):
    """Whether a step was marked for moving, the first of those that are made again and so the last that is marked."""
    record = folder / "steps" / f"{name}.json"
    return (
        not record.exists()
        or json.loads(record.read_text())["aside"] is not None
        or (folder / "earlier").exists()
    )


def test_more_steps_go_on_from_the_restart_points(whole):
    job = Job(whole, steps=5)
    assert job.run()["after"] == 45
    assert job.calls == ["step 4", "step 5", "after"]
    assert (whole / "earlier/after/after.json").is_file()
    assert job.notes == [
        "after is made again, because the result of train changed; what it was is in earlier/after"
    ]


def test_fewer_steps_than_are_done_change_nothing(whole):
    job = Job(whole, steps=2)
    job.run()
    assert job.calls == []


def test_restart_points_of_a_done_step_may_be_deleted(whole):
    shutil.rmtree(whole / "checkpoints")
    job = Job(whole)
    job.run()
    assert job.calls == []


def test_restart_points_are_made_again_if_a_step_needs_them(whole):
    shutil.rmtree(whole / "checkpoints")
    job = Job(whole, metric="max")
    assert job.run()["after"] == 18
    assert job.calls == ["step 1", "step 2", "step 3", "after"]


def test_another_identity_is_made_again_and_what_gives_the_same_result_keeps_its_followers(whole):
    job = Job(whole, metric="max")
    job.run()
    assert job.calls == ["after"]
    assert job.notes == [
        "after is made again, because metric was mean and is max; what it was is in earlier/after"
    ]
    (whole / "again").mkdir()
    job = Job(whole, metric="mean")
    job.run()
    # Moved a second time, beside the first.
    assert sorted(each.name for each in (whole / "earlier").iterdir()) == ["after", "after-2"]


def test_a_change_of_what_a_precious_step_began_with_is_refused_with_both_values(whole):
    before = contents(whole)
    job = Job(whole, scale=2)
    with pytest.raises(
        RopewalkError,
        match=r"a different toy, which differs in table\.scale \(1 in the folder, 2 given\); give another --out, or "
        r"give the settings of that toy, with which its step table began, to resume it$",
    ):
        job.run()
    assert contents(whole) == before
    assert job.calls == []


def test_a_precious_step_whose_input_turns_out_otherwise_is_refused_at_its_turn(whole):
    # Its rows change the table, which nobody can know before.
    job = Job(whole, data="b")
    job._table = lambda work: {"sum": 4}
    with pytest.raises(
        RopewalkError, match=r"the step train in .* began with something else: the result of table"
    ):
        job.run()
    assert (whole / "checkpoints/step-3.json").is_file()


def test_a_lost_table_comes_back_from_its_log(whole):
    wanted = contents(whole)
    (whole / "table.json").unlink()
    job = Job(whole)
    job.run()
    assert job.calls == []
    assert contents(whole) == wanted
    assert job.notes == [f"{whole}/table.json: table.json is missing; table is made again"]


def test_a_damaged_step_must_give_the_result_again_that_others_used(whole):
    (whole / "table.json").write_text("{}")
    job = Job(whole)
    job._table = lambda work: {"sum": 4}
    for _ in range(2):
        # The promise outlives the process that found the damage.
        with pytest.raises(
            RopewalkError, match=r"table in .* was damaged and made again, but .*: sum was 3 and is 4; start"
        ):
            job.run()
    assert Job(whole).run()["after"] == 18


def test_a_damaged_step_whose_file_comes_back_with_another_date_keeps_its_followers(whole):
    (whole / "table.json").write_text("{}")
    job = Job(whole)

    def dated(work):
        write_json(work.file("table.json"), {"sum": 3, "date": "today"})
        return {"sum": 3}

    job._table = dated
    assert job.run()["after"] == 18
    again = Job(whole)
    again.run()
    assert (job.calls, again.calls) == ([], [])


@pytest.fixture
def remarks(tmp_path):
    """Runs a step that makes a number with a remark and a dated file, and a step that uses the number alone."""

    def run(number, remark, decides=lambda value: value["number"]):
        ran = []

        def first(work):
            ran.append("first")
            write_json(work.file("table.json"), {"number": number, "remark": remark})
            return {"number": number, "remark": remark}

        def second(work):
            ran.append("second")
            return work.inputs["first"]["number"]

        with opened(tmp_path / "run", "toy", World()) as store:
            steps = [
                Step("first", dict, (), first, decides=decides),
                Step("second", dict, ("first",), second),
            ]
            return ran, Runner(store, World()).run(steps)

    return run


@pytest.mark.parametrize("lost", ["steps/first.json", "table.json"])
def test_what_decides_nothing_may_come_back_otherwise(remarks, tmp_path, lost):
    remarks(1, "in 2 seconds")
    (tmp_path / "run" / lost).unlink()
    assert remarks(1, "in 3 seconds") == (
        ["first"],
        {"first": {"number": 1, "remark": "in 3 seconds"}, "second": 1},
    )


def test_what_decides_must_come_back_or_its_followers_are_made_again(remarks, tmp_path):
    remarks(1, "in 2 seconds")
    (tmp_path / "run/steps/first.json").unlink()
    assert remarks(2, "in 2 seconds")[0] == ["first", "second"]
    (tmp_path / "run/table.json").unlink()
    with pytest.raises(RopewalkError, match=r"was damaged and made again.*was 2 and is 3"):
        remarks(3, "in 2 seconds")


def test_an_input_that_a_step_did_not_have_is_known_to_be_another_result_at_once(whole):
    """So that a precious step is refused before anything runs, whatever the input will be."""

    class Sharper(Job):
        def list(self):
            rows, table, train, after = super().list()
            grid = Step("grid", dict, (), self._rows)
            return [rows, table, grid, replace(train, inputs=("table", "grid")), after]

    job = Sharper(whole)
    with pytest.raises(
        RopewalkError, match=r"train in .* began with something else: the result of grid changed"
    ):
        job.run()
    assert job.calls == []


def test_a_damaged_step_that_nothing_uses_may_give_another_result(whole):
    (whole / "after.json").write_text("{}")
    job = Job(whole)
    job._after = lambda work: 19
    assert job.run()["after"] == 19


def test_what_could_not_run_is_tried_again_and_does_not_hold_up_the_rest(tmp_path):
    job = Job(tmp_path / "run", unable="no server")
    assert job.run()["after"] == 18
    assert json.loads((job.folder / "steps/table.json").read_text())["open"] == "no server"
    job = Job(job.folder)
    job.run()
    # The same result: what follows stands.
    assert job.calls == []
    assert json.loads((job.folder / "steps/table.json").read_text())["open"] is None


def test_until_stops_after_a_step_and_the_rest_goes_on_later(tmp_path):
    job = Job(tmp_path / "run")
    assert job.run(until="table") == {"rows": {"rows": 1}, "table": {"sum": 3}}
    assert job.calls == ["rows", "loss 0", "loss 1", "loss 2"]
    job.calls.clear()
    job.run()
    assert job.calls == ["step 1", "step 2", "step 3", "after"]


def test_a_step_that_raises_is_begun_and_goes_on_from_what_it_kept(tmp_path):
    job = Job(tmp_path / "run")

    def fails(work):
        log = work.log("table.jsonl", _numbers(), header={"scale": 1})
        log.add((0, 0))
        raise RopewalkError("the power went")

    job._table = fails
    with pytest.raises(RopewalkError, match="the power went"):
        job.run()
    again = Job(job.folder)
    again.run()
    assert again.calls[:2] == ["loss 1", "loss 2"]


def _numbers():
    from tests.runs.job_cases import NUMBERS

    return NUMBERS


def test_a_full_disk_is_one_sentence_and_the_run_can_go_on(tmp_path, whole):
    wanted = contents(whole)
    for size in (0, 60, 150, 300, 450, 600):
        job = Job(tmp_path / str(size))
        # The lock's file is small too.
        with files_no_larger_than(size), pytest.raises(RopewalkError, match=r"^cannot (write|lock) .*"):
            job.run()
        Job(job.folder).run()
        assert contents(job.folder) == wanted


def test_the_folder_of_a_refused_job_is_not_made(tmp_path):
    def refuse():
        raise RopewalkError("this model cannot")

    step = Step("only", refuse, (), lambda work: 1)
    with pytest.raises(RopewalkError, match="cannot"), opened(tmp_path / "out", "toy", World()) as store:
        Runner(store, World()).run([step])
    assert list(tmp_path.iterdir()) == []


def test_ranks_follow_rank_0(tmp_path, two_ranks):
    from tests.runs.rank_cases import shared_job

    alone = Job(tmp_path / "alone")
    alone.run()
    found = two_ranks.run(shared_job, str(tmp_path / "together"))
    # Rank 1 sees neither the disk nor the hooks, but the values of rank 0.
    assert [each["values"] for each in found] == [alone.run()] * 2
    assert [each["hooks"] for each in found] == [True, False]
    assert [each["bodies"] for each in found] == [4, 4]
    done = two_ranks.run(shared_job, str(tmp_path / "together"))
    assert [each["bodies"] for each in done] == [0, 0]
    assert [each["values"] for each in done] == [found[0]["values"]] * 2


def test_what_rank_0_refuses_ends_every_rank(tmp_path, two_ranks):
    from tests.runs.rank_cases import refused_job

    assert two_ranks.run(refused_job, str(tmp_path / "together"), seconds=60.0) == ["RopewalkError", "Echo"]
