"""A copy of a function calls other functions, and is otherwise the same."""

from ropewalk.models.compute.own_globals import with_globals


def doubled(x):
    return 2 * x


def caller(x, add=1, *, less=2):
    return doubled(x) + add - less


def test_the_copy_alone_calls_other_functions_and_keeps_every_default():
    copy = with_globals(caller, {"doubled": lambda x: 10 * x})
    assert (copy(3), copy(3, 5), copy(3, less=0)) == (29, 33, 31)
    assert caller(3) == 5


def test_a_closure_goes_along():
    def made(factor):
        return lambda x: doubled(factor * x)

    assert with_globals(made(3), {"doubled": lambda x: x})(2) == 6
