"""RULER (arXiv:2404.06654): thirteen tasks of retrieval, tracing, aggregation and question answering."""
