"""The only room that imports the internals of transformers and of trackers."""
