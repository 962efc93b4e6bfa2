"""RoPE of a stage: given in the recipe, read from a factor table, searched, or chosen among candidates (``auto``)."""
