"""How a model is computed.

Its files::

    losses             token losses in chunks of logits
    tiles, tiled_mlp   MLPs and experts in tiles of tokens
    pieces             what lies around attention, fused
    own_globals        a function of transformers that calls functions of ours
    float64            a model in float64, experts one by one
    offload            tensors in CPU memory between forward and backward
    routing            experts' loads, and the load-balancing loss
    products           matrix products that a token takes part in
"""
