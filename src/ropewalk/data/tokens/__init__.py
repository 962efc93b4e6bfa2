"""Documents as token ids on disk, and the index that everything after them needs."""
