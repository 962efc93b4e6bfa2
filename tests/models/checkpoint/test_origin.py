"""Where a checkpoint comes from is read from files on this machine, and tells nothing about its folders."""

from pathlib import Path

from ropewalk.models.checkpoint.origin import Origin, origin_of

CARD = "---\nlicense: other\nlicense_name: llama3.1\nlanguage:\n- en\n- de\ntags: [a]\n---\n# A model\n"


def checkpoint(folder: Path, card: str | None = CARD) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def test_a_folder_gives_the_last_part_of_its_name_and_the_licence(tmp_path):
    folder = checkpoint(tmp_path / "secret" / "llama")
    kept = {"license": "other", "license_name": "llama3.1", "language": ["en", "de"]}
    assert origin_of(str(folder)) == Origin("llama", card=kept)
    assert origin_of(str(folder), "embedded").name == "embedded"


def test_the_result_of_a_run_is_named_after_the_run(tmp_path):
    assert origin_of(str(checkpoint(tmp_path / "first" / "model"))).name == "first"


def test_a_folder_of_the_cache_of_the_hub_gives_its_id_and_revision(tmp_path):
    folder = checkpoint(tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0e9e39f", None)
    assert origin_of(str(folder)) == Origin("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "0e9e39f")


def test_a_name_on_the_hub_is_found_in_the_cache(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "models--a--b" / "snapshots" / "c0ffee")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    found = origin_of("a/b")
    assert (found.name, found.hub_id, found.revision, found.card["license"]) == (
        "a/b",
        "a/b",
        "c0ffee",
        "other",
    )
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    assert origin_of("a/b") == Origin("a/b", "a/b")


def test_values_that_are_no_text_are_left_out(tmp_path):
    card = "---\nlicense: {a: 1}\nlanguage: [en, 3]\nlicense_name: ''\nlicense_link: LICENSE\n---\n"
    assert origin_of(str(checkpoint(tmp_path / "m", card))).card == {"license_link": "LICENSE"}
