"""``ropewalk plan`` and ``extend --dry-run`` through the program's own main."""

import json

import pytest
import yaml

from ropewalk.cli.app import main
from ropewalk.training.simulation.rank_costs import play, played_by
from tests.dry_run.cases import model_folder, recipe_of


@pytest.fixture
def recipe(tmp_path):
    made = recipe_of(model_folder(tmp_path / "model"), tmp_path / "run")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(made.model_dump(mode="json", exclude_defaults=True)))
    return path


@pytest.fixture
def shared_process(aside):
    """Dry runs of several tests share a process; another test starts one as a plan does."""

    with played_by(lambda *arguments: aside(play, *arguments)):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("shared_process")
def test_json_and_picture(recipe, tmp_path, capsys):
    picture = tmp_path / "memory.png"
    command = ["plan", str(recipe), "--gpus", "2", "--gpu", "a100", "--document-length", "100", "--json"]
    assert main([*command, "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["device"]) == (2, "a100")
    assert found["stages"][0]["fits"] is True
    assert picture.stat().st_size > 1000
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_process")
def test_a_dry_run_trains_and_writes_nothing(recipe, tmp_path, capsys):
    assert main(["extend", str(recipe), "--dry-run", "--set", "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "on 1 x cpu" in out
    assert "its speed is not known" in out
    assert not (tmp_path / "run").exists()


def test_wrong_values_are_refused(recipe, capsys):
    assert main(["plan", str(recipe), "--gpus", "0"]) == 2
    assert "0" in capsys.readouterr().err
    assert main(["plan", str(recipe), "--gpu", "h101"]) == 2
    assert "--gpu: unknown GPU 'h101'; choose from h100, h200, a100," in capsys.readouterr().err
    assert main(["plan", "missing.yaml", "--gpu", "RTX 4090"]) == 2
    assert "GPU" not in capsys.readouterr().err
    assert main(["plan", "missing.yaml"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
