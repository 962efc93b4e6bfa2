"""Recurrent layers in a dry run: the kernels that a GPU runs for them, and torch's loops over chunks.

Its files::

    launch       a kernel: the tensors that it reads and writes, and its operations
    convolution  causal-conv1d
    delta_rule   flash-linear-attention: gated DeltaNet and Kimi's rule
    scan         mamba-ssm: Mamba-2
    few_chunks   a loop of transformers over chunks, played for a few of them
    stand_ins    which of these takes the place of which function of a mixer
"""
