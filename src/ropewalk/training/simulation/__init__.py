"""The training step on tensors without data, on a mesh of simulated ranks: what a step takes, without its hardware.

Its files::

    step               one optimizer step of a stage on one simulated rank
    few_layers         a few layers of each kind stand for all
    extending          sums of what a few layers, or chunks of a row, take
    recurrent          kernels of recurrent layers, and their loops
    assumed_documents  rows as the recipe's documents would fill them
    simulated          a GPU without memory, and ranks without processes
    recording          every allocation, operator, collective and wait of a step
    compiled           fused functions in a recording
    operations         operations and scratch memory of attention kernels and experts
    bytes_moved        bytes that an operator reads and writes
    memory             memory of a rank by part and by moment
    rank_costs         what a step takes on one rank, in processes of its own
    roofline           time of the operators on assumed hardware
"""
