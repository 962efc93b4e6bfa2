"""A decoder's config, read once and strictly.

Its files::

    model        ModelConfig: what a config says, layer by layer
    file         a config.json, completed as its class in transformers would
    read, write  a config as transformers reads it; with another RoPE, in the spelling that all programs read
    layers       keys about layers: their spellings, defaults and valid values
    documented   lengths that publishers state elsewhere than in the config
    parameters   parameters counted from the config
    auto_class   the class of transformers that loads its model
"""
