"""Attention of transformers models.

Its files::

    hooks                packed rows in its attention
    recurrent, runs      packed rows in recurrent layers, run by run
    passed_states        the same if rows are spread over ranks
    kernels              kernels of recurrent layers that keep documents apart
    indexed              packed rows in sparse attention with an indexer
    kv_cache             its cache of keys and values
"""
