"""Folders of checkpoints.

Its files::

    weights, loaded_weights   tensors in files, and what came of them in memory
    save, whole               a model without traces of our parts; a decoder with the encoders of its source
    origin, card              a checkpoint's name, revision and model card
    export, gguf              another RoPE in a checkpoint or a GGUF file
"""
