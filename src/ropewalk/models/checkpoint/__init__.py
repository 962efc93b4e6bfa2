"""Folders of checkpoints.

Its files::

    weights, loaded_weights   tensors in files, and what came of them in memory
    save                      a model without traces of our parts
    origin, card              a checkpoint's name, revision and model card
    export, gguf              another RoPE in a checkpoint or a GGUF file
"""
