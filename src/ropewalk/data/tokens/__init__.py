"""Tokenised documents on disk, and an in-memory index of them."""
