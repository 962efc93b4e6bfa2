"""RULER (arXiv:2404.06654): thirteen tasks of retrieval, tracing, counting and answering over long texts."""
