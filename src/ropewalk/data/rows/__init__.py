"""Packed rows: planned from lengths, filled with token ids, kept on disk."""
