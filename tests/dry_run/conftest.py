"""Dry steps run in a process of their own, as in a plan: the simulated device must precede the first backward."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def aside():
    """Calls a function of a test module in a process that no other test uses."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield lambda function, *arguments, **named: process.submit(function, *arguments, **named).result()
