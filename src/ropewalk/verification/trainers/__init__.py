"""probe-trainer: check in anybody's trainer that documents stay apart, and that loss, RoPE and windows are right."""
