"""Estimates for a run on a mesh: memory, bytes sent and time, and the choice of the mesh."""
