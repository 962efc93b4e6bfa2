"""The RoPE method of each stage: given, from a table, searched for, or chosen by measurement."""
