"""How a model is computed.

Its files::

    losses             token losses in chunks of logits
    tiles, tiled_mlp   MLPs and experts in tiles of tokens
    pieces             what lies around attention, fused
    float64            a model in float64, experts one by one
    offload            tensors in CPU memory between forward and backward
    routing            experts' loads, and the load-balancing loss
"""
