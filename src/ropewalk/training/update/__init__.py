"""One optimizer step, as a function of model, rows and mesh.

Its files::

    step         gradients in micro-batches, their clipping, and the update of the weights
    optimizer    AdamW with float32 master weights, learning-rate schedules
    host_copies  copies between a GPU and CPU memory while the GPU computes
    clock        seconds of the parts of a step
    speed        floating-point operations per second, and their share of the GPU's peak
    peak_memory  peak memory of the GPU, or of the process on a CPU
"""
