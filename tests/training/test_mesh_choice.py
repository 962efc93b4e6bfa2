"""The automatic mesh: what it returns can be trained and fits; what it refuses, it says how to mend."""

import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.errors import EngineError
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.mesh_check import check_mesh
from ropewalk.planning.sizing.time import H100, Transfers
from ropewalk.training import mesh_choice
from ropewalk.training.memory_need import USABLE, Need, most_kept
from ropewalk.training.mesh_choice import WORTH, DoesNotFit, MeshChoice
from ropewalk.training.recipe.stage import Stage
from tests.versions import pretend_transformers

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "parameters": 8_030_261_248,
}
LLAMA_70B = LLAMA_8B | {"num_hidden_layers": 80, "hidden_size": 8192, "parameters": 70_553_706_496}
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 12,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "parameters": 3_000_000,
}


INDEXED = {"layer_types": ["indexed_attention"] * 2, "model_type": "deepseek_v32"}
ROPE = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 8192}


@dataclass(frozen=True)
class ByFormula(MeshChoice):
    """A search whose dry runs are a formula: states, what layers keep, and a layer in its backward."""

    def need(self, mesh, with_kept=False):
        stage, layers, hidden = self.stage, len(self.config.layers), self.config.values["hidden_size"]
        tokens = stage.rows_per_batch * -(-stage.context // mesh.sequence_degree)
        states = 0 if stage.offload_optimizer else 16 * self.parameters // mesh.shard_degree
        kept = 20 * layers if not stage.gradient_checkpointing else 2 if stage.offload_activations else layers
        tile = min(tokens, stage.tiled_mlp or tokens)
        gathered = 10 * self.parameters // layers
        device = states + gathered + 2 * hidden * (kept * tokens + 10 * tokens + 20 * tile)
        bytes_ = 6 * self.parameters * (mesh.shard_degree - 1) // mesh.shard_degree
        messages = 3 * layers
        over = (8 * self.parameters // mesh.shard_degree, 2 * layers) if mesh.replicate > 1 else (0, 0)
        sent = Transfers((bytes_, messages), over, (0, 0), (0, 0), 0)
        return Need(device, 0, 6e-14 * self.parameters * tokens, sent)


def searching(model=LLAMA_8B, length=2**17, rows=128, checkpointing=True, cluster=H100, **changes):
    machines = {key: changes.pop(key) for key in ("ranks_per_node", "bytes_per_rank") if key in changes}
    parameters = model["parameters"]
    config = ModelConfig({key: value for key, value in model.items() if key != "parameters"} | ROPE)
    values = {"context": length, "rows_per_step": rows, "steps": 1, "learning_rate": 1e-5} | changes
    stage = Stage.model_validate(values | {"gradient_checkpointing": checkpointing})
    return ByFormula(
        config, parameters, stage, "bfloat16", None, True, replace(cluster, **machines), lambda *_: None, 0
    )


def choose(*given, world=8, **changes):
    return searching(*given, **changes).choose(world)


CASES = st.fixed_dictionaries(
    {
        "world": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        "ranks_per_node": st.sampled_from([1, 2, 4, 8]),
        "length": st.integers(16, 200_000),
        "rows": st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48, 64, 128]),
        "bytes_per_rank": st.sampled_from([10**8, 3 * 10**8, 10**9, 10**10]),
        "checkpointing": st.booleans(),
    }
)


def chosen(case):
    """The mesh, or None where it is refused; a refusal is one sentence, and says what would do."""
    try:
        return choose(SMALL, **case)
    except DoesNotFit as error:
        said = f"{error}; {error.remedy()}"
    except RopewalkError as error:
        said = str(error)
    assert "\n" not in said
    assert re.search(r"; (use|set|even [\d,]+ ranks would not suffice)", said)
    return None


def candidates(case):
    """Every mesh without replicas that could be taken, by definition, ascending."""
    world, node = case["world"], case["ranks_per_node"]
    for degree in range(1, min(world, case["length"]) + 1):
        if world % degree == 0:
            sequence = max(
                d
                for d in range(1, degree + 1)
                if degree % d == 0 and 12 % d == 0 and d <= node and (world <= node or node % d == 0)
            )
            yield MeshShape(shard=world // degree, ring=degree // sequence, sequence=sequence)


def suits(mesh, case):
    needed = searching(SMALL, **{key: value for key, value in case.items() if key != "world"}).need(mesh)
    return needed.device <= USABLE * case["bytes_per_rank"] and case["rows"] % mesh.data_degree == 0


@given(CASES)
def test_the_least_degree_that_suits_is_chosen(case):
    mesh = chosen(case)
    first = next((each for each in candidates(case) if suits(each, case)), None)
    assert (mesh is None) == (first is None)
    if mesh is not None:
        assert (mesh.ring, mesh.sequence) == (first.ring, first.sequence)
        check_mesh(mesh, case["world"], 12, case["length"], case["rows"], 1)
        assert suits(mesh, case)


def test_the_mesh_grows_with_the_row():
    degrees = [choose(world=16, length=2**n, rows=16).sequence_degree for n in range(13, 20)]
    assert degrees == sorted(degrees)
    assert (degrees[0], degrees[-1]) == (1, 8)
    assert choose(world=16, length=2**19, rows=16) == MeshShape(shard=2, sequence=8)


def test_rows_that_are_few_are_cut_finer():
    assert choose(world=64, rows=64, length=8192) == MeshShape(shard=64)
    assert choose(world=64, rows=16, length=8192) == MeshShape(shard=16, sequence=4)
    assert choose(world=64, rows=1, length=8192) == MeshShape(ring=8, sequence=8)


def test_replicas_are_taken_where_they_save_time_alone():
    assert choose(world=64, length=2**17, rows=64).replicate == 1
    slow = replace(H100, network=5e9, network_latency=1e-2)
    mesh = choose(world=64, length=8192, rows=64, cluster=slow)
    assert mesh.replicate > 1
    assert mesh.shard_degree % 8 == 0
    search = searching(length=8192, rows=64, cluster=slow)
    assert search.seconds(mesh) < (1 - WORTH) * search.seconds(MeshShape(shard=64))
    # Within a node there are none, however slow its steps.
    assert choose(world=8, length=8192, rows=8, cluster=replace(H100, nvlink_latency=1e-2)).replicate == 1
    # A 70B model does not fit on one node, so its shards span several.
    assert choose(LLAMA_70B, world=64, length=8192, rows=64, cluster=slow).shard_degree > 8


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "model_type": "qwen3_next"}


def of_family(values):
    """The search for a model of two layers."""
    config = ModelConfig(
        {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8, "rope_theta": 1e4} | values
    )
    return replace(searching(), config=config)


def test_rows_of_hybrids_are_split_where_states_can_pass(monkeypatch):
    split = [
        MeshShape(shard=8),
        MeshShape(shard=4, sequence=2),
        MeshShape(shard=2, sequence=4),
        MeshShape(sequence=8),
    ]
    assert list(of_family(HYBRID).meshes(8)) == split
    pretend_transformers(monkeypatch, "5.23.0")
    assert list(of_family(HYBRID).meshes(8)) == [MeshShape(shard=8)]


def test_rows_that_indexers_choose_from_stay_whole_without_a_dry_run():
    search = of_family(INDEXED)
    assert list(search.meshes(8)) == [MeshShape(shard=8)]
    assert not list(search.hybrids(MeshShape(shard=64)))
    with mock.patch.object(ByFormula, "need", side_effect=AssertionError):
        assert search.fits(MeshShape(shard=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"length": 2**20, "rows": 16},
            r"rows of 1,048,576 tokens do not fit on 8 ranks with the stage's settings: even with "
            r"parallel: {sequence: 8}, "
            r"a rank needs an estimated [\d.]+ GB, but has 80\.0 GB, of which 72\.0 GB are usable; set "
            r"offload_activations to true$",
        ),
        ({"length": 2**17, "checkpointing": False}, r"; set gradient_checkpointing to true$"),
        (
            {"length": 2**21, "rows": 16, "offload_activations": True},
            r"; set tiled_mlp to 16,384$",
        ),
        (
            {"length": 2**22, "rows": 16},
            r"; set offload_activations to true, and tiled_mlp to 16,384, and offload_optimizer to true$",
        ),
        (
            {"length": 2**23, "rows": 4},
            r"a rank needs [\d.]+ GB or more, but has 80\.0 GB, of which 72\.0 GB are usable; use 64 ranks$",
        ),
        ({"bytes_per_rank": 10**9}, r"; even 2,048 ranks would not suffice$"),
        (
            {"length": 16, "rows": 3, "world": 32},
            r"no mesh of 32 ranks both divides rows_per_step 3 evenly and has enough memory for rows of 16 tokens; set "
            r"rows_per_step to a multiple of 2, which divides evenly over parallel {shard: 2, ring: 2, sequence: 8}$",
        ),
    ],
)
def test_what_does_not_suit_is_said_with_what_would(changes, message):
    try:
        choose(**changes)
    except DoesNotFit as error:
        said = f"{error}; {error.remedy()}"
    except RopewalkError as error:
        said = str(error)
    assert re.search(message, said), said


def test_no_dry_run_where_a_bound_decides(monkeypatch):
    monkeypatch.setattr(ByFormula, "need", lambda *_, **__: pytest.fail("played"))
    assert choose(SMALL, length=1024) == MeshShape(shard=8)
    assert not searching(LLAMA_70B).fits(MeshShape(shard=8))


@dataclass(frozen=True)
class Keeps(ByFormula):
    """A search that notes its dry runs, in which keeping attention adds as much as it can."""

    played: list = field(default_factory=list)

    def need(self, mesh, with_kept=False):
        self.played.append(with_kept)
        plain = super().need(mesh)
        added = most_kept(self.config, self.stage, mesh, self.precision)
        return replace(plain, device=plain.device + with_kept * added)


@pytest.mark.parametrize(
    ("with_kept", "spare", "fits", "played"),
    [
        (False, -1, False, [True]),
        (False, 1, True, [True, False]),
        (True, 1, True, [True]),
    ],
)
def test_a_mesh_is_played_without_kept_attention_if_it_may_then_fit(with_kept, spare, fits, played):
    search, mesh = Keeps(**vars(searching())), MeshShape(shard=4, sequence=2)
    memory = int(search.need(mesh, with_kept).device / USABLE) + spare
    search = replace(search, cluster=replace(H100, bytes_per_rank=memory), played=[])
    assert search.bounds(mesh).decides(memory) is None
    assert (search.fits(mesh), search.played) == (fits, played)


def test_a_model_that_no_dry_run_can_follow_needs_a_mesh_of_its_own(monkeypatch):
    def fails(resolved, number):
        raise EngineError("it cannot")

    monkeypatch.setattr(mesh_choice, "played_need", fails)
    search = searching()
    plain = MeshChoice(**{name: getattr(search, name) for name in MeshChoice.__dataclass_fields__})
    unkept = SimpleNamespace(
        stages=[SimpleNamespace(settings=SimpleNamespace(stage=search.stage), engine="flex")]
    )
    unkept.device = SimpleNamespace(type="cuda")
    with pytest.raises(RopewalkError, match=r"fails: it cannot; in the recipe, set parallel\.replicate"):
        replace(plain, on_mesh=lambda *_: unkept).choose(8)
