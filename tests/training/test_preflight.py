"""Which rows a process reads, and what is refused before several processes begin."""

import json
import re
import shutil

import pytest
import torch
import yaml
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, Cohere2Config, DbrxConfig, PhimoeConfig

from ropewalk.attention import AttentionSpec, resolve_engine
from ropewalk.attention.choices import KEEP_FROM
from ropewalk.attention.kept import Keeping
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.config.layers import INDEXERS_SINCE
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape, World
from ropewalk.training import preflight
from ropewalk.training.memory_need import USABLE, Need
from ropewalk.training.preflight import Machine, announcement, refuse_on_mesh, resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from tests.models.every_family import tiny_config
from tests.training.sharded_cases import too_short
from tests.training.tiny import INDEXED, save_tiny
from tests.versions import WRITES_DBRX, needs_transformers, pretend_transformers

WORLD = World(rank=0, size=4, local_rank=0, local_size=4)


def refused(values, world=WORLD, **changed):
    with pytest.raises(RopewalkError) as caught:
        resolve(Recipe.model_validate({**values, **changed}), world)
    return str(caught.value)


def test_what_does_not_divide_is_refused_before_anything_loads(recipe_values):
    # Two heads, two rows a step, 128 tokens.
    assert "sequence 4 does not divide the model's 2 attention heads" in refused(
        recipe_values, parallel={"sequence": 4}
    )
    assert "rows_per_step must be a positive multiple of 4" in refused(recipe_values, parallel={"shard": 4})
    assert "needs 2 ranks, but 4 were started" in refused(recipe_values, parallel={"ring": 2})


def test_engines_that_need_whole_rows_are_refused_under_a_ring(recipe_values):
    recipe = Recipe.model_validate({**recipe_values, "parallel": {"ring": 4}, "engine": "reference"})
    with pytest.raises(EngineError, match="engine reference needs all keys of a row at once"):
        resolve(recipe, WORLD)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_host_too_small_for_what_is_sent_there_is_refused(recipe_values, monkeypatch, ranks):
    """Four ranks of a machine send there what one does: quarters of rows and of the optimizer."""
    monkeypatch.setattr(preflight, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(preflight, "require_devices", lambda world, device: None)
    memory = {"cpu": 0, "cuda": 0}
    monkeypatch.setattr(preflight, "device_bytes", lambda device: memory[device.type])
    offloads = dict.fromkeys(("gradient_checkpointing", "offload_activations", "offload_optimizer"), True)
    (stage,) = recipe_values["stages"]
    values = recipe_values | {
        "precision": "bfloat16",
        # auto plays steps, and what is kept counts with none of these figures.
        "stages": [stage | offloads | {"keep_attention": False}],
        "parallel": {"ring": ranks},
    }
    world = World(rank=0, size=ranks, local_rank=0, local_size=ranks)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(values["model"])
        parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    # Weights, gradients and two moments in float32, and the bfloat16 input of each layer.
    needed = 16 * parameters + config.num_hidden_layers * 128 * config.hidden_size * 2
    memory["cpu"] = needed
    resolve(Recipe.model_validate(values), world)
    memory["cpu"] -= 1
    message = refused(values, world)
    assert message.startswith(
        f"stages.0 would keep {needed / 1e9:.3g} GB or more in the CPU memory of a machine"
    )
    assert "set offload_activations or offload_optimizer to false, or train on more machines" in message


@pytest.mark.parametrize(
    ("config", "precision", "engine"),
    [
        # The checkpoint's heads have 8 dimensions: too few for flex's products.
        ({}, "bfloat16", "varlen"),
        ({}, "float32", "sdpa"),
        ({"head_dim": 36}, "bfloat16", "flex"),
        ({"head_dim": 36}, "float32", "flex"),
        ({"head_dim": 64, "v_head_dim": 32}, "bfloat16", "flex"),
        ({"head_dim": 64, "attn_logit_softcapping": 30.0}, "bfloat16", "flex"),
    ],
)
def test_the_plan_names_the_engine_that_attends(
    recipe_values, tiny_checkpoint, tmp_path, monkeypatch, config, precision, engine
):
    monkeypatch.setattr("ropewalk.training.preflight.choose_device", lambda name: torch.device("cuda"))
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    recipe = Recipe.model_validate({**recipe_values, "model": str(folder), "precision": precision})
    chosen = resolve(recipe).engine
    assert chosen == engine
    heads = config.get("head_dim", 8)
    met = AttentionSpec(
        "cuda",
        torch.float32 if precision == "float32" else torch.bfloat16,
        heads,
        config.get("v_head_dim", heads),
        config.get("attn_logit_softcapping"),
    )
    assert resolve_engine(met) == chosen


def test_one_process_alone_says_how_to_start_several(recipe_values):
    said = refused(recipe_values, World(), parallel={"ring": 2, "sequence": 2})
    assert "parallel {ring: 2, sequence: 2} needs 4 processes, but only one was started" in said
    assert "torchrun --nproc-per-node 4 -m ropewalk" in said


def test_auto_takes_a_mesh_that_fits_ranks_heads_and_rows(recipe_values):
    assert resolve(Recipe.model_validate(recipe_values), World()).mesh == MeshShape()
    mesh = resolve(Recipe.model_validate(recipe_values), WORLD).mesh
    assert mesh.world_size == 4
    assert 2 % mesh.data_degree == 0
    assert 2 % mesh.sequence == 0


AWAY = {"offload_activations": True}


@pytest.mark.parametrize(
    ("over", "settings", "expected"),
    [
        (0, {}, Keeping(0, on_device=True)),
        (0, AWAY, Keeping(0, on_device=True)),
        (1, {}, None),
        (1, AWAY, Keeping(KEEP_FROM)),
        (1, {"keep_attention": True}, Keeping(0)),
        (0, {"keep_attention": True}, Keeping(0)),
        (0, {"keep_attention": False}, None),
        (0, {"gradient_checkpointing": False}, None),
    ],
    ids=str,
)
def test_auto_keeps_attention_on_a_gpu_with_room_for_it(recipe_values, monkeypatch, over, settings, expected):
    def played(resolved, number):
        assert resolved.stages[number].keeping == Keeping(0, on_device=True)
        return Need(int(USABLE * 10**9) + over, 0)

    monkeypatch.setattr(preflight, "played_need", played)
    values = recipe_values | {"precision": "bfloat16", "engine": "varlen"}
    values["stages"] = [values["stages"][0] | {"gradient_checkpointing": True} | settings]
    recipe = Recipe.model_validate(values)
    # Too little for the bound to decide.
    machine = Machine(torch.device("cuda", 0), 10**9, (9, 0))
    resolved = resolve(recipe, World(), machine=machine)
    assert resolved.stages[0].keeping == expected
    assert any("results of attention are kept" in line for line in announcement(resolved)) == (
        expected is not None
    )
    # Another engine computes whole rows, of which nothing is kept.
    assert resolved.with_engine(0, "flex").stages[0].keeping is None


def test_a_cpu_keeps_attention_with_what_is_offloaded_alone(recipe_values):
    (stage,) = recipe_values["stages"]
    for settings, expected in (({}, None), (AWAY, Keeping(KEEP_FROM))):
        values = recipe_values | {"stages": [stage | {"gradient_checkpointing": True} | settings]}
        assert resolve(Recipe.model_validate(values), World()).stages[0].keeping == expected


def test_kept_attention_needs_checkpointing_and_a_kernel(recipe_values):
    recipe_values["stages"][0]["keep_attention"] = True
    with pytest.raises(ValueError, match="keep_attention: true needs gradient_checkpointing: true"):
        Recipe(**recipe_values)
    recipe_values["stages"][0]["gradient_checkpointing"] = True
    recipe_values["engine"] = "reference"
    with pytest.raises(EngineError, match="needs engine sdpa or varlen, but the stage runs reference"):
        resolve(Recipe(**recipe_values), World())


def test_offloading_needs_checkpointing(recipe_values):
    recipe_values["stages"][0]["offload_activations"] = True
    with pytest.raises(ValueError, match="offload_activations needs gradient_checkpointing: true"):
        Recipe.model_validate(recipe_values)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"ring": 0}, "parallel.ring must be 1 or more, got 0"),
        ({"ulysses": 2}, "unknown key parallel.ulysses; known keys are replicate, ring, sequence, shard"),
        ({"rings": 2}, "unknown key parallel.rings; did you mean ring?"),
        (
            "best",
            "parallel must be 'auto' or a mapping of replicate, shard, sequence, ring, got 'best'",
        ),
    ],
)
def test_an_error_in_the_degrees_names_the_key(recipe_values, parallel, said):
    with pytest.raises(RopewalkError, match=re.escape(said)):
        parse_recipe(yaml.safe_dump({**recipe_values, "parallel": parallel}), "recipe")


@pytest.mark.parametrize(
    ("setting", "device", "missing", "compiled"),
    [
        ("auto", "cpu", "", False),
        ("auto", "cuda", "", True),
        ("auto", "cuda", "the package triton", False),
        (True, "cpu", "", True),
        (False, "cuda", "", False),
    ],
)
def test_auto_compiles_on_a_gpu_where_torch_can(
    recipe_values, monkeypatch, setting, device, missing, compiled
):
    monkeypatch.setattr(preflight, "compiler_missing", lambda _: missing)
    recipe_values["stages"][0]["compile"] = setting
    stage = Recipe.model_validate(recipe_values).stages[0]
    assert preflight._compiled(stage, torch.device(device), planned=False) is compiled


def test_compile_is_refused_where_torch_cannot_and_planned_for_another_machine(recipe_values, monkeypatch):
    monkeypatch.setattr(preflight, "compiler_missing", lambda _: "the package triton")
    recipe_values["stages"][0]["compile"] = True
    recipe = Recipe.model_validate(recipe_values)
    with pytest.raises(RopewalkError, match=r"^compile: true needs the package triton to compile for cpu"):
        resolve(recipe)
    assert preflight._compiled(recipe.stages[0], torch.device("cuda"), planned=True)


@pytest.mark.parametrize("key", ["resid_pdrop", "hidden_dropout", "router_jitter_noise"])
def test_dropout_is_refused_on_a_mesh(recipe_values, tiny_checkpoint, tmp_path, key):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 0.1, "classifier_dropout": 0.1}))
    values = {**recipe_values, "model": str(tmp_path / "model")}
    assert f"the model has {key} 0.1" in refused(values, parallel={"ring": 4})
    assert resolve(Recipe.model_validate(values), World()).mesh == MeshShape()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PhimoeConfig(), "routers of phimoe draw experts at random"),
        (DbrxConfig(ffn_config={"moe_jitter_eps": 0.01}), "the model has moe_jitter_eps 0.01"),
    ],
)
def test_routers_that_draw_random_numbers_are_refused_on_a_mesh(config, said):
    with pytest.raises(RopewalkError, match=said):
        refuse_on_mesh(MeshShape(shard=2), ModelConfig.of(config), True, [])


@pytest.mark.parametrize(
    ("family", "precision", "works_in"),
    [("dbrx", "bfloat16-autocast", "bfloat16"), ("minimax", "bfloat16", "bfloat16-autocast")],
)
def test_a_precision_that_a_family_cannot_run_in_is_refused(
    recipe_values, tiny_checkpoint, tmp_path, family, precision, works_in
):
    if family == "dbrx":
        needs_transformers(*WRITES_DBRX)
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = tiny_config(family)
    config.max_position_embeddings = 64
    config.vocab_size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    config.save_pretrained(tmp_path / "model")
    values = {**recipe_values, "model": str(tmp_path / "model"), "parallel": {"shard": 2}}
    world = World(rank=0, size=2, local_rank=0, local_size=2)
    said = refused(values, world, precision=precision)
    assert re.search(
        f"precision {precision} .*does not suit {family}, .* set precision to either .*{works_in}", said
    )
    resolve(Recipe.model_validate({**values, "precision": works_in}), world)


def test_stock_rope_that_depends_on_the_length_is_refused_before_anything_loads(recipe_values):
    factors = [1.0, 1.0, 1.0, 2.0]
    rope = {"method": "longrope", "short_factor": [1.0] * 4, "long_factor": factors}
    recipe_values["stages"][0]["rope"] = rope
    recipe_values["exact_rope"] = False
    assert "transformers' longrope would use the length of each rank's part of a row" in refused(
        recipe_values, parallel={"ring": 4}
    )
    recipe_values["stages"][0]["rows_per_step"] = 4
    assert resolve(Recipe.model_validate({**recipe_values, "parallel": {"shard": 4}}), WORLD).mesh.shard == 4


def test_auto_suits_every_stage_or_is_refused(recipe_values):
    (stage,) = recipe_values["stages"]
    # By themselves four rows would be read by four groups, and two rows by two groups of two.
    both = [{**stage, "context": 64, "rows_per_step": 4}, {**stage, "rows_per_step": 2}]
    mesh = resolve(Recipe.model_validate({**recipe_values, "stages": both}), WORLD).mesh
    assert mesh.data_degree == 2
    thirds = [{**stage, "context": 64, "rows_per_step": 4}, {**stage, "rows_per_step": 1, "context": 128}]
    mesh = resolve(Recipe.model_validate({**recipe_values, "stages": thirds}), WORLD).mesh
    assert mesh.data_degree == 1


def test_a_stage_has_the_mesh_that_it_asks_for(recipe_values):
    (stage,) = recipe_values["stages"]
    stage = {**stage, "rows_per_step": 4}
    own = {**stage, "parallel": {"ring": 2, "sequence": 2}}
    found = resolve(Recipe.model_validate({**recipe_values, "stages": [stage, own]}), WORLD)
    assert found.mesh.data_degree == found.stages[0].mesh.data_degree == 4
    assert found.stages[1].mesh == MeshShape(ring=2, sequence=2)
    # Without a stage that shares it, the run's mesh is that of the last stage.
    every = Recipe.model_validate({**recipe_values, "stages": [{**stage, "parallel": {"shard": 4}}, own]})
    assert resolve(every, WORLD).mesh == MeshShape(ring=2, sequence=2)
    auto = [{**stage, "parallel": "auto"}, stage]
    found = resolve(Recipe.model_validate({**recipe_values, "parallel": {"ring": 4}, "stages": auto}), WORLD)
    assert found.stages[0].mesh.data_degree == 4
    assert found.mesh == found.stages[1].mesh == MeshShape(ring=4)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"ring": 2}, r"^stages\.1\.parallel {ring: 2} needs 2 ranks, but 4"),
        ({"sequence": 4}, r"^stages\.1\.parallel\.sequence 4 does not divide"),
        ({"shard": 4, "ring": 2}, r"^stages\.1\.parallel {shard: 4, ring: 2} needs 8 ranks"),
    ],
)
def test_a_mesh_that_does_not_suit_a_stage_is_refused_unless_the_stage_is_done(recipe_values, parallel, said):
    (stage,) = recipe_values["stages"]
    stage = {**stage, "rows_per_step": 4}
    values = {**recipe_values, "stages": [stage, {**stage, "parallel": parallel}]}
    with pytest.raises(RopewalkError, match=said):
        resolve(Recipe.model_validate(values), WORLD)
    resolve(Recipe.model_validate(values), WORLD, training=range(1))
    alone = rf"stages\.1\.parallel {{.*}} needs {MeshShape(**parallel).world_size} processes"
    with pytest.raises(RopewalkError, match=alone):
        resolve(Recipe.model_validate(values))


def test_errors_keep_their_kind_and_get_the_rank(four_ranks):
    kind, said = four_ranks.run(too_short)[1]
    assert kind == "RopewalkError"
    assert said.startswith("rank 1: the task needle does not fit in 7 tokens")


def test_limits_are_lifted_where_there_are_any_and_dual_chunks_must_be(
    recipe_values, tiny_checkpoint, tmp_path
):
    def model(name, **keys):
        folder = shutil.copytree(tiny_checkpoint, tmp_path / name)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **keys}))
        return str(folder)

    windows = model("windows", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    chunks = model("chunks", dual_chunk_attention_config={"original_max_position_embeddings": 64})
    alone = World()
    assert "lift: [windows] in the recipe" in refused(recipe_values, alone, model=windows)
    resolved = resolve(Recipe.model_validate({**recipe_values, "model": windows, "lift": ["windows"]}), alone)
    assert resolved.engine == "sdpa"
    assert "set lift: [dual_chunk_attention]" in refused(recipe_values, alone, model=chunks)
    lifted = Recipe.model_validate({**recipe_values, "model": chunks, "lift": ["dual_chunk_attention"]})
    assert resolve(lifted, alone).trained_length == 64
    message = "lift.0 is 'windows', but the model has no such limit to remove; leave lift out"
    assert message in refused(recipe_values, alone, lift=["windows"])


def test_rope_that_is_only_in_windows_may_stay(recipe_values, tmp_path):
    """Cohere 2: layers of full attention have no RoPE, so a stage trains them with the RoPE that there is."""
    folder = tmp_path / "cohere2"
    shutil.copytree(recipe_values["model"], folder)
    said = json.loads((folder / "config.json").read_text())
    config = Cohere2Config(
        vocab_size=said["vocab_size"],
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        max_position_embeddings=64,
        sliding_window=16,
    )
    config.save_pretrained(folder)
    values = {**recipe_values, "model": str(folder)}
    stages = [{**stage, "rope": {"method": "default"}} for stage in values["stages"]]
    with pytest.raises(EngineError, match="has RoPE only in layers with a sliding window"):
        resolve(Recipe.model_validate(values))
    resolved = resolve(Recipe.model_validate({**values, "stages": stages}))
    assert set(resolved.methods) == {resolved.rope}


def with_stage(values, model, **stage):
    return {**values, "model": str(model), "stages": [{**values["stages"][0], **stage}]}


def test_the_load_balancing_loss_counts_as_the_config_or_the_recipe_says(
    recipe_values, tiny_experts, tmp_path
):
    def factor(model=tiny_experts, **stage):
        recipe = Recipe.model_validate(with_stage(recipe_values, model, **stage))
        return resolve(recipe).router_aux_losses

    # Its config states 0.02, and does not count it.
    assert factor() == (0.0,)
    assert factor(router_aux_loss=0.001) == (0.001,)
    counting = shutil.copytree(tiny_experts, tmp_path / "counting")
    config = json.loads((counting / "config.json").read_text())
    (counting / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    assert factor(counting) == (0.02,)
    assert factor(counting, router_aux_loss=0) == (0.0,)


def test_a_load_balancing_loss_of_nothing_is_refused(
    recipe_values, tiny_checkpoint, tiny_experts, monkeypatch
):
    asked = with_stage(recipe_values, tiny_checkpoint, router_aux_loss=0.1)
    assert refused(asked, None) == (
        "stages.0.router_aux_loss is 0.1, but the model has no mixture of experts; omit router_aux_loss"
    )
    monkeypatch.setattr("ropewalk.training.preflight.records_routing", lambda config: False)
    asked = with_stage(recipe_values, tiny_experts, router_aux_loss=0.1)
    pretend_transformers(monkeypatch, "5.19.0")
    said = refused(asked, None)
    assert said.endswith(
        "transformers does not record the router logits of mixtral, which this loss needs; set "
        "stages.0.router_aux_loss to 0"
    )
    pretend_transformers(monkeypatch, "5.18.1")
    assert refused(asked, None) == (
        f"{said}, or try transformers 5.19 or later, which records router logits of more models "
        "than the installed 5.18.1"
    )
    for factor in (-0.1, "off"):
        with pytest.raises(ValidationError, match="router_aux_loss"):
            Recipe.model_validate(with_stage(recipe_values, tiny_experts, router_aux_loss=factor))


def test_auto_takes_a_mesh_for_a_mixture_of_experts(recipe_values, tiny_experts):
    recipe = Recipe.model_validate({**with_stage(recipe_values, tiny_experts, rows_per_step=4)})
    assert resolve(recipe, WORLD).mesh == MeshShape(shard=4)


def test_a_run_says_which_kernels_of_recurrent_layers_are_missing(recipe_values, tmp_path):
    """On a GPU of its own alone: a plan for other machines takes them to be installed, and a CPU has none."""
    own = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
    recipe_values["model"] = str(save_tiny(tmp_path / "hybrid", "Bamba", **own))
    recipe = Recipe.model_validate(recipe_values | {"engine": "sdpa"})
    gpu = torch.device("cuda", 0)
    packages = ("causal-conv1d", "mamba-ssm")
    for machine, missing in (
        (Machine(gpu, 80 * 10**9, (9, 0), elsewhere=False), packages),
        (Machine(gpu, 80 * 10**9, (9, 0)), ()),
        (Machine(torch.device("cpu"), 80 * 10**9, elsewhere=False), ()),
    ):
        resolved = resolve(recipe, World(0, 1, 0, 1), machine=machine)
        assert resolved.missing == missing
        said = [
            line for line in announcement(resolved) if "recurrent layers run transformers' own code" in line
        ]
        assert bool(said) == bool(missing)
        assert all("causal-conv1d and mamba-ssm are not installed" in line for line in said)


def test_a_run_says_that_indexers_are_not_trained_and_shares_no_row(recipe_values, tmp_path):
    needs_transformers(INDEXERS_SINCE, "a model with indexers")
    own = {key: value for key, value in INDEXED.items() if key not in ("model_type", "architectures")}
    recipe_values["model"] = str(save_tiny(tmp_path / "indexed", "DeepseekV32", **own))
    said = announcement(resolve(Recipe.model_validate(recipe_values)))
    assert any(line.startswith("indexers are not trained: no gradient reaches them") for line in said)
    ringed = Recipe.model_validate(recipe_values | {"parallel": {"ring": 2}})
    with pytest.raises(EngineError, match="the indexers of deepseek_v32 choose among all earlier tokens"):
        resolve(ringed, World(0, 2, 0, 2))
