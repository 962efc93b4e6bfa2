"""Attention of transformers models.

Its files::

    hooks       packed rows in its attention
    recurrent   packed rows in recurrent layers
    kernels     kernels of recurrent layers that keep documents apart
    kv_cache    its cache of keys and values
"""
