"""Names of cells: what varies, with as few digits as tell cells apart, and nothing that a terminal obeys."""

import pytest

from ropewalk.experiments.cell_names import cell_names


def names(key, *values):
    return cell_names([key], [[value] for value in values], [f"folder-{n}" for n in range(len(values))])


@pytest.mark.parametrize(
    ("key", "values", "found"),
    [
        # YAML reads 1e4 as text.
        ("stages.*.rope.rope_theta", ("1e4", 300_000), ["base 1e4", "base 3e5"]),
        ("stages.0.rope.rope_theta", (79_760_692.22, 4.87e6), ["base 7.98e7", "base 4.87e6"]),
        (
            "stages.0.rope.rope_theta",
            (79_760_692.22, 79_760_692),
            ["base 79760692.22", "base 79760692"],
        ),
        ("stages.*.learning_rate", (2e-5, 0.001), ["lr 2e-5", "lr 0.001"]),
        ("stages.*.pattern", ("full", "intra_document"), ["pattern full", "pattern intra_document"]),
        ("stages.0.context", (32_768, "128k"), ["context 32k", "context 128k"]),
        ("stages.0.rows_per_step", (8, 16), ["rows per step 8", "rows per step 16"]),
        ("exact_rope", (True, False), ["exact rope yes", "exact rope no"]),
        ("lift", ([], ["windows"]), ["lift none", "lift windows"]),
        (
            "stages.0.rope",
            ({"method": "yarn"}, {"method": "theta", "rope_theta": 8e4}),
            ["yarn", "base 8e4"],
        ),
        (
            "stages.*.rope",
            ("theta", {"method": "yarn", "factor": 4}, {"rope_theta": 3e5}, "yarn"),
            ["base auto", "yarn factor 4", "base 3e5", "yarn"],
        ),
        # Unsafe, too long, or equal once written: the folder's name.
        ("model", ("\x1b[31m", "m" * 90, "mine"), ["folder-0", "folder-1", "model mine"]),
        ("model", (1, "1", "b"), ["folder-0", "folder-1", "model b"]),
    ],
)
def test_a_cell_is_named_by_what_varies(key, values, found):
    assert names(key, *values) == found


def test_keys_with_the_same_last_part_are_told_apart():
    keys = ["stages.0.learning_rate", "stages.1.learning_rate", "stages.*.pattern"]
    assert cell_names(keys, [[1e-5, 2e-5, "full"]], ["folder"]) == [
        "stage 1 lr 1e-5, stage 2 lr 2e-5, pattern full"
    ]
