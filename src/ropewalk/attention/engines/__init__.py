"""The engines that compute attention over packed rows, one module each, and a table of their capabilities.

Its files::

    sdpa, varlen, plain    kernels that attend within runs
    flex, reference        engines that compute whole rows
    capabilities           what each engine can do
    runs, blocks           the runs of a row, and the blocks of the attention matrix that it touches
    simulated_flex         flex as a dry run sees it
"""
