"""Attention of transformers models.

Its files::

    hooks                packed rows in its attention
    recurrent, runs      packed rows in recurrent layers, run by run
    kernels              kernels of recurrent layers that keep documents apart
    kv_cache             its cache of keys and values
"""
