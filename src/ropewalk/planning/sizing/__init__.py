"""What a run on a mesh takes: memory, bytes sent and time, and the mesh that suits it."""
