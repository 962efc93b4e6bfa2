"""``ropewalk rope`` through the program's own main: published numbers as JSON, plain words, refusals, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cli.app import main
from ropewalk.rope import METHODS, Default, DynamicNtk, longrope_attention_factor, method_for_target
from ropewalk.rope.theory import context_bound
from tests.marks import slow_after
from tests.places import CONFIGS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(line: str, *more: object, status: int = 0) -> str:
        assert main(["rope", *line.split(), *map(str, more)]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return call


def as_json(text: str) -> dict[str, Any]:
    return json.loads(text)


@pytest.mark.parametrize(("base", "bound"), [("10000", 1706), ("500000", 18437), ("1e6", 27114), ("100", 58)])
def test_bound(run, base: str, bound: int) -> None:
    said = as_json(run(f"bound --rope-theta {base} --rotary-dim 128 --json"))
    assert said["context_bound"] == bound
    assert said["first_violation"] == bound + 1
    assert said["margin_there"] < 0
    assert f"context bound {bound:,} tokens" in run(f"bound --rope-theta {base} --rotary-dim 128")


def test_a_bound_beyond_the_search_is_at_least_its_limit(run, monkeypatch) -> None:
    from ropewalk.planning import bases
    from ropewalk.reporting import rope

    monkeypatch.setattr(bases, "context_bound", lambda inv_freq: context_bound(inv_freq, 1000))
    for module in (bases, rope):
        monkeypatch.setattr(module, "SEARCH_LIMIT", 1000)
    said = as_json(run("bound --rope-theta 1e9 --rotary-dim 128 --json"))
    assert (said["context_bound"], said["at_least"], said["first_violation"]) == (1000, True, None)
    assert "more than 1,000 tokens" in run("bound --rope-theta 1e9 --rotary-dim 128")


def test_base(run) -> None:
    said = as_json(run("base --length 8192 --rotary-dim 128 --json"))
    assert said["infimum"] == pytest.approx(83763.84, rel=1e-6)
    assert said["safe_base"] == pytest.approx(394327.9, rel=1e-6)
    assert said["ceiling"] == 1e9
    assert len(said["feasible"]) == 35
    assert said["feasible"][0][0] == said["infimum"]
    assert said["feasible"][-1] == [said["safe_base"], 1e9]
    text = run("base --length 8k --rotary-dim 128")
    assert "35; the bases between them are not feasible" in text
    assert "the 12 widest of 35" in text


def test_other_bases_have_bounds_of_their_own(run) -> None:
    said = as_json(run("bound --rope-theta 1e4 --rotary-dim 128 --compare 5e5,1e6 --json"))
    assert [other["context_bound"] for other in said["others"]] == [18437, 27114]


def test_base_that_no_ceiling_can_help(run) -> None:
    assert "a single pair has the same frequency at every base" in run("base --length 8k --rotary-dim 2")
    in_a_hole = run("base --length 1000 --rotary-dim 128 --ceiling 5000")
    said = " ".join(in_a_hole.replace("│", " ").split())
    assert "none: the ceiling of 5000 is infeasible" in said
    assert "every base reaches" not in said


def test_base_says_when_the_ceiling_is_too_low_or_near(run) -> None:
    none = run("base --length 8k --rotary-dim 128 --ceiling 1000")
    assert "No base up to 1000 reaches 8,192 tokens with rotary_dim 128; raise --ceiling" in none
    near = "base --length 8k --rotary-dim 128 --ceiling 1e6"
    assert as_json(run(near, "--json"))["safe_base_near_ceiling"]
    assert "raise --ceiling" in run(near)


def test_theta_of_gradient(run) -> None:
    line = "theta --rope-theta 500000 --from 8192 --to 262144 --rotary-dim 128"
    said = as_json(run(line, "--json"))
    assert said["rope_theta"] == pytest.approx(283461213.5, abs=0.05)
    assert (said["rule"], said["critical_dimension"]) == ("critical-dimension", 70)
    assert said["context_bound"] == 896529
    text = run(line)
    for part in ("formula", "source", "caveat", "arXiv:2310.05209", "covers the target"):
        assert part in text


@pytest.mark.parametrize(
    ("rule", "theta"),
    [("ntk", 10000 * 8 ** (128 / 126)), ("schedule:lwm", 1e6), ("lower-bound", 3_327_000.0)],
)
def test_theta_by_other_rules(run, rule: str, theta: float) -> None:
    said = as_json(run(f"theta --rope-theta 10000 --from 4k --to 32k --rotary-dim 128 --rule {rule} --json"))
    assert said["rope_theta"] == pytest.approx(theta, rel=1e-3)
    assert said["rule"] == rule
    assert said["reaches_target"] == (said["context_bound"] >= 32768)
    assert said["reaches_target"] or rule != "lower-bound"


def test_the_ceiling_of_the_lower_bound_is_the_given_one(run) -> None:
    line = "theta --rope-theta 1e4 --from 4k --to 8k --rotary-dim 128 --rule lower-bound"
    assert as_json(run(line, "--json"))["rope_theta"] == 394400.0
    assert "no base up to 10000 is large enough for 8192 tokens" in run(f"{line} --ceiling 1e4", status=2)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"longrope", "dynamic", "proportional"}))
def test_frequencies_of_every_method(run, method: str) -> None:
    said = as_json(
        run(f"frequencies --method {method} --rope-theta 10000 --rotary-dim 64 --from 4096 --to 65536 --json")
    )
    expected = method_for_target(method, Default(64, 10000.0), 4096, 65536)
    inv_freq, attention_factor = expected.frequencies(65536)
    assert said["inv_freq"] == inv_freq.tolist()
    assert said["attention_factor"] == attention_factor


def test_frequencies_of_dynamic_and_longrope(run, tmp_path: Path) -> None:
    rest = "--rope-theta 10000 --rotary-dim 4 --from 4096 --to 65536 --json"
    dynamic = as_json(run(f"frequencies --method dynamic {rest}"))
    assert dynamic["inv_freq"] == DynamicNtk(4, 10000.0, 16.0, 4096).frequencies(65536).inv_freq.tolist()
    factors = tmp_path / "factors.json"
    factors.write_text('{"short_factor": [1, 1], "long_factor": [1, 8]}')
    longrope = as_json(run(f"frequencies --method longrope {rest} --factors", factors))
    assert longrope["inv_freq"] == pytest.approx([1.0, 0.01 / 8])
    assert longrope["attention_factor"] == longrope_attention_factor(16, 4096)
    assert "longrope needs short_factor" in run(f"frequencies --method longrope {rest}", status=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bound --rope-theta 1 --rotary-dim 128", "rope_theta must be a finite number above 1, got 1.0"),
        (
            "bound --rope-theta 1e4 --rotary-dim 127",
            "rotary_dim must be an even whole number, at least 2, got 127",
        ),
        ("bound --rope-theta 1e4", "missing option --rotary-dim"),
        ("bound --rope-theta 1e4 --rotary-dim 128 --compare much", "--compare must be a number, got 'much'"),
        (
            "bound --rope-theta 1e4 --rotary-dim 128 --plot x.jpg",
            "a figure is written as .png or .svg, got x.jpg",
        ),
        ("base --length 8q --rotary-dim 128", "'8q' is not a length"),
        ("base --length 8k --rotary-dim 128 --ceiling 0.5", "the ceiling must be above 1"),
        ("theta --rope-theta 1e4 --from 8k --to 4k --rotary-dim 128", "must be at least the trained length"),
        ("theta --rope-theta 1e4 --from 4k --to 8k --rotary-dim 128 --rule cd", "unknown rule 'cd'"),
        (
            "frequencies --method yarm --rope-theta 1e4 --rotary-dim 128 --from 4k --to 8k",
            "unknown RoPE method 'yarm'",
        ),
        ("plan nowhere/at-all/there --to 1M", "there is no folder or file nowhere/at-all/there"),
        ("plan embedded --to 1M --rule yarm", "unknown rule 'yarm'"),
        ("plan embedded --to 1M --rule current", "the rule 'current' keeps RoPE as it is"),
        ("theta --rope-theta 1e4 --from 4k --to 1025M --rotary-dim 128", "may be at most 1073741824 tokens"),
        ("bound --rope-theta 1e4 --rotary-dim 1000000", "at most 2048 rotated dimensions, got 1000000"),
        ("plan embedded --to 128", "must be above the trained length of 256 tokens, got 128"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(run, line: str, message: str) -> None:
    said = run(line, status=2)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said


def test_plan_of_llama_3(run) -> None:
    said = as_json(run("plan --to 1M --json", CONFIGS / "llama-3-8b.json"))
    assert [stage["context"] for stage in said["stages"]] == [65536, 262144, 1048576]
    assert {stage["method"] for stage in said["stages"]} == {"theta"}
    assert [round(stage["rope_theta"]) for stage in said["stages"]] == [22443169, 283461213, 3580165449]
    assert all(stage["reason"] for stage in said["stages"])
    text = run("plan --to 1M", CONFIGS / "llama-3-8b.json")
    assert "rope: {method: theta, rope_theta: 3580165449" in text


def test_plan_takes_the_length_that_the_user_knows(run) -> None:
    said = as_json(run("plan --to 64k --from 8k --rule ntk --json", CONFIGS / "mistral-7b-v0.2.json"))
    assert said["trained_length"] == 8192
    assert said["stages"][0]["rope_theta"] == pytest.approx(1e6 * 8 ** (128 / 126))


def test_plan_refuses_what_extend_refuses(run) -> None:
    said = run(f"plan --to 64k --from 8k {CONFIGS / 'mistral-7b-v0.1.json'}", status=2)
    assert "ropewalk extend does not train this model at 65,536 tokens" in said
    assert "a sliding window of 4,096 tokens in every layer" in said


def test_plan_says_why_and_theta_and_plan_agree(run) -> None:
    text = run("plan --to 128k", CONFIGS / "llama-2-7b.json")
    assert "4,869,104 is the smallest base" in text
    planned = as_json(run("plan --to 128k --json", CONFIGS / "llama-2-7b.json"))
    by_hand = as_json(run("theta --rope-theta 10000 --from 4k --to 128k --rotary-dim 128 --json"))
    assert planned["stages"][-1]["rope_theta"] == by_hand["rope_theta"] == 4869104.38
    assert by_hand["rule"] == "length-floor"
    assert by_hand["reason"] + "." in [f"{r[0].lower()}{r[1:]}" for r in planned["advice"]["reasons"]]


def test_plan_of_a_scaled_checkpoint_with_a_base_says_the_base_in_the_recipe(run) -> None:
    said = as_json(run("plan --to 1M --rule theta=1e8 --json", CONFIGS / "qwen2.5-7b-instruct-yarn.json"))
    assert said["stages"][0]["method"] == "theta"
    assert "rope: {method: theta, rope_theta: 100000000}" in said["recipe"]


def test_plan_tells_what_the_config_left_to_its_class(run) -> None:
    said = as_json(run("plan --to 32k --rule ntk --json", CONFIGS / "llama-2-7b.json"))
    assert said["defaults"] == {"rope_theta": 10000.0}
    assert "config.json omits rope_theta" in run("plan --to 32k --rule ntk", CONFIGS / "llama-2-7b.json")


@pytest.mark.parametrize(
    "line",
    slow_after(
        2,
        [
            "bound --rope-theta 10000 --rotary-dim 32 --compare 1e5",
            "base --length 2k --rotary-dim 128",
            "base --length 1000 --rotary-dim 128 --ceiling 1e7",
            "base --length 6 --rotary-dim 128",
            "theta --rope-theta 10000 --from 4k --to 32k --rotary-dim 128",
            "frequencies --method yarn --rope-theta 10000 --rotary-dim 128 --from 4k --to 64k",
        ],
    ),
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(run, line: str, suffix: str, tmp_path: Path) -> None:
    picture = tmp_path / f"picture.{suffix}"
    assert str(picture) in run(line, "--plot", picture).replace("\n", "")
    assert picture.stat().st_size > 5000
    assert picture.read_bytes()[:4] == (b"\x89PNG" if suffix == "png" else b"<?xm")
