"""Bytes of operators by hand."""

from tests.training.simulation import recording_cases as cases


def test_bytes_are_those_that_operators_read_and_write(aside):
    found = aside(cases.recorded, cases.reads_and_writes).operators
    matrix, row = 64 * 32 * 4, 32 * 4
    assert {each.name: (each.bytes, each.kind) for each in found} == {
        # Both factors and the product; of the row that is repeated, one copy.
        "aten.mul.Tensor": (2 * matrix + row, "other"),
        # In place: itself twice, and the other.
        "aten.add_.Tensor": (3 * matrix, "other"),
        # What is overwritten is not read.
        "aten.copy_": (2 * matrix, "other"),
        "aten.fill_.Scalar": (matrix, "other"),
        # Lists are written in place, and returned by nobody.
        "aten._foreach_mul_.Scalar": (2 * 2 * matrix, "other"),
        "aten.mm": (2 * matrix + 64 * 64 * 4, "matmul"),
    }
