"""A decoder's config, read once and strictly.

Its files::

    model        ModelConfig: what a config says, layer by layer
    file         a config.json, completed as its class in transformers would
    layers       keys about layers: their spellings, defaults and valid values
    documented   lengths that publishers state elsewhere than in the config
    parameters   parameters counted from the config
"""
