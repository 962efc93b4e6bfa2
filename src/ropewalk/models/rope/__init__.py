"""The rotary module of a transformers model.

Its files::

    rotary        find it, and replace it by ours or by one with another method
    frequencies   which frequencies a model holds: after a load, in memory, in its weights, saved and loaded again
    generation    one length, and so one choice of frequencies, for a whole generation
"""
