"""The only package that imports internals of transformers.

Its files::

    config, config_file, config_layers  a decoder's config, read once and strictly
    documented                          lengths that publishers state elsewhere than in the config
    origin, card                        a checkpoint's name, revision and model card
    support                             which families work, as tested
    parameters                          parameters counted from the config
    load                                load with our attention and rotary module, save without
    weights, loaded_weights             tensors in files, and what came of them in memory
    attention                           packed rows in attention of transformers
    rotary, held_rope                   replace the rotary module; which frequencies a model holds
    generation, kv_cache                answers beyond the trained length; keys and values
    losses, tiles, tiled_mlp            losses, MLPs and experts computed in tiles
    pieces                              what lies around attention, fused
    float64                             a model computed in float64, experts one by one
    offload                             tensors in CPU memory between forward and backward
    routing                             experts' loads, and the load-balancing loss
    adapter, adapter_settings           LoRA
    sharding                            FSDP2 shards over several ranks
    export, gguf                        another RoPE in a checkpoint or a GGUF file
"""
