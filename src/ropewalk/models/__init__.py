"""The only package that imports internals of transformers.

Its files::

    load                        load a model with our attention and rotary module
    encoders                    what lies beside a text decoder, out of memory
    adapter, adapter_settings   LoRA
    sharding                    FSDP2 shards over several ranks
    support                     which families work, as tested
    config                      a decoder's config, read once and strictly
    checkpoint                  folders of checkpoints: weights, names, cards, exports
    rope                        the rotary module: ours in its place, its frequencies, its length
    attention                   packed rows in attention of transformers, recurrent layers, the cache
    softmax_scale               a constant scale of the scores, folded into the weights of the queries
    compute                     losses, tiles, fused pieces, float64, offload, loads of experts
"""
