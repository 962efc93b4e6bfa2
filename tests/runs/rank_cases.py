"""What ranks run in the tests of jobs; spawned processes import it by name."""

from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import write_json
from ropewalk.parallel import joined
from ropewalk.runs import Runner, Step, Work, opened
from tests.runs.job_cases import STEPS


def shared_job(folder: str) -> dict[str, Any]:
    """The values of a job as this rank sees them, how many bodies it ran, and whether it was asked by a hook."""
    hooks: list[str] = []
    bodies: list[str] = []
    told = {"rows": {"rows": 1}, "table": {"sum": 3}, "train": {"state": 18, "steps": 3}, "after": 18}
    with joined("cpu") as world:

        def step(number: int, name: str) -> Step:
            def identity() -> dict[str, Any]:
                hooks.append(name)
                return {"name": name}

            def body(work: Work) -> Any:
                bodies.append(name)
                # Collective: a body that only some ranks ran would wait for ever.
                assert world.gather(name) == [name, name]
                if world.is_rank_0:
                    write_json(work.file(f"{name}.json"), name)
                # The value of another rank does not count.
                return told[name] if world.is_rank_0 else "mine"

            return Step(name, identity, STEPS[:number], body)

        steps = [step(number, name) for number, name in enumerate(STEPS)]
        with opened(Path(folder), "toy", world) as store:
            values = Runner(store, world).run(steps)
    return {"values": values, "bodies": len(bodies), "hooks": bool(hooks)}


def refused_job(folder: str) -> str:
    """Kind of the error that this rank raises when rank 0 refuses a change of a precious step."""
    try:
        with joined("cpu") as world:
            for seed in (0, 1):
                step = Step("only", lambda seed=seed: {"seed": seed}, (), lambda work: 1, precious=True)
                with opened(Path(folder), "toy", world) as store:
                    Runner(store, world).run([step])
    except RopewalkError as error:
        return type(error).__name__
    return "nothing"
