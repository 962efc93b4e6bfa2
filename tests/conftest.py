"""Shared by all tests: where the reference files lie, and quiet libraries."""

import gc
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ropewalk.parallel import rank_pool
from tests.places import SHARED

# Times are measured in benchmarks; a busy machine must not fail a property.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Each run draws others.
    max_examples=int(os.environ.get("EXAMPLES", "15")),
)
settings.load_profile("untimed")

# Before any library reads them: no bars between test results, and no look-up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models run faster on one thread, and tests do not disturb each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

# The server that ranks and programs are forks of has imported ropewalk too, which takes each of them a second.
rank_pool.LIBRARIES += ["ropewalk.cli.extend", "ropewalk.training.run", "ropewalk.reporting.run.training"]

# A test's files need not outlive a power cut, and waiting for a busy disk takes longer than most tests.
os.fsync = lambda file: None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collecting makes half a million objects, and none of them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Each process begins with some of the slow files, so that none is left with one when the others have finished."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault(item.path, []).append(item)
    fast = iter([item for item in items if not item.get_closest_marker("slow")])
    # A longer time-out marks the longest. A file stays whole: its tests share what they set up.
    files = sorted(
        slow.values(), key=lambda tests: not any(test.get_closest_marker("timeout") for test in tests)
    )
    ordered = []
    for worker in range(workers):
        # xdist gives each process as many tests, in this order.
        size = (len(items) - len(ordered)) // (workers - worker)
        share = list(itertools.chain.from_iterable(files[worker::workers]))
        ordered += [*share, *itertools.islice(fast, max(0, size - len(share)))]
    items[:] = [*ordered, *fast]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Half characters that a hostile test prints or fails with are written out: processes exchange reports as UTF-8."""
    report = yield
    report.sections = [(name, _whole(text)) for name, text in report.sections]
    if report.failed and str(report.longrepr) != _whole(str(report.longrepr)):
        report.longrepr = _whole(str(report.longrepr))
    return report


def _whole(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A real pretrained checkpoint, beside the checkout."""
    folder = SHARED / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("the stories260k checkpoint is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def stories() -> Path:
    """Real documents for it, beside the checkout."""
    file = SHARED / "text" / "stories.jsonl"
    if not file.is_file():
        pytest.skip("stories.jsonl is not beside this checkout")
    return file


@pytest.fixture(scope="session")
def aside():
    """Calls a function of a test module in a process for dry runs: their device must precede the first backward."""
    from concurrent.futures import ProcessPoolExecutor

    from ropewalk.training.simulation.simulated import register_device

    # Whichever test is first: torch sizes its backward's queues by the devices that it then knows.
    with ProcessPoolExecutor(1, rank_pool.process_context(), initializer=register_device) as process:
        yield lambda function, *arguments, **named: process.submit(function, *arguments, **named).result()


@pytest.fixture(scope="session")
def two_ranks():
    """Two processes over gloo, started once."""
    with rank_pool.Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks():
    """Four processes over gloo, started once."""
    with rank_pool.Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_stays():
    """Modules and collected tests, half a million objects, are not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()
