"""Reading documents: files, records and data sets of every kind as one stream of documents."""
