"""Folders of several formats, to be cut into input splits."""

import json

from ropewalk.data.read.documents import Document
from ropewalk.data.read.input_splits import InputSplit, read_input_split


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def texts(split: InputSplit) -> list[str]:
    return [d.text for r in read_input_split(split) for d in r.documents if isinstance(d, Document)]
