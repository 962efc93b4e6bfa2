"""Drop long documents that compress far better or worse than most of their source.

A page of noise hardly compresses, and one that repeats itself compresses far too well. OLMo 3 drops the fifth of its
long documents at either end (arXiv:2512.13961).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.io.lengths import counted

LEVEL = 6
"""zlib's level: the default of gzip."""


def gzip_ratio(text: str) -> float:
    """Bytes of a text in UTF-8 for each byte that zlib makes of them: about 1 for noise, 100 for one repeated word.

    Args:
        text: a text that is not empty.
    """
    content = text.encode("utf-8")
    return len(content) / len(zlib.compress(content, LEVEL))


@dataclass(frozen=True)
class Dropped:
    """The long documents of one source at either end of the gzip ratio.

    Attributes:
        source: name of the source.
        long_documents: number of long documents that have a ratio, including those that are dropped.
        lowest, highest: ratios that are kept, both ends included; None if the source has no such document.
        low_documents, low_tokens: documents below ``lowest`` and their tokens.
        high_documents, high_tokens: documents above ``highest`` and their tokens.
    """

    source: str
    long_documents: int
    lowest: float | None
    highest: float | None
    low_documents: int = 0
    low_tokens: int = 0
    high_documents: int = 0
    high_tokens: int = 0


def drop_by_gzip_ratio(
    lengths: NDArray[np.int64],
    source_ids: NDArray[np.int32],
    sources: Sequence[str],
    ratios: NDArray[np.float64],
    settings: MixtureSettings,
) -> tuple[NDArray[np.bool_], tuple[Dropped, ...]]:
    """Choose which documents to keep: all but the long ones beyond the quantiles of their source.

    A long document has at least ``settings.long_length`` tokens. It is dropped if its ratio is less than the quantile
    ``drop_gzip_low`` of its source's long documents, or more than the quantile ``1 - drop_gzip_high``, as
    ``numpy.quantile`` interpolates them.

    Args:
        lengths: int64 ``[n]``, own tokens of each document.
        source_ids: int32 ``[n]``, index into ``sources``.
        sources: names of the sources.
        ratios: float64 ``[n]``, :func:`gzip_ratio`; NaN for a document without a ratio, which is kept.
        settings: the mixture.

    Returns:
        bool ``[n]``, which documents are kept, and what was dropped of each source.
    """
    assert settings.long_length is not None
    kept = np.ones(len(lengths), bool)
    long = (lengths >= settings.long_length) & ~np.isnan(ratios)
    dropped = []
    for index, source in enumerate(sources):
        members = np.flatnonzero(long & (source_ids == index))
        if not len(members):
            dropped.append(Dropped(source, 0, None, None))
            continue
        own = ratios[members]
        lowest, highest = np.quantile(own, [settings.drop_gzip_low, 1 - settings.drop_gzip_high])
        low, high = members[own < lowest], members[own > highest]
        kept[low] = kept[high] = False
        dropped.append(
            Dropped(
                source,
                len(members),
                float(lowest),
                float(highest),
                low_documents=len(low),
                low_tokens=int(lengths[low].sum()),
                high_documents=len(high),
                high_tokens=int(lengths[high].sum()),
            )
        )
    return kept, tuple(dropped)


def gzip_report(dropped: Sequence[Dropped], settings: MixtureSettings, version: str) -> dict[str, Any]:
    """What a manifest says: the thresholds that were found, what they dropped, and the zlib that they hold for.

    Args:
        dropped: from :func:`drop_by_gzip_ratio`.
        settings: the mixture.
        version: version of zlib that compressed the texts; others, such as zlib-ng, give other sizes.
    """
    return {
        "zlib": version,
        "level": LEVEL,
        "long_from": settings.long_length,
        "drop_low": settings.drop_gzip_low,
        "drop_high": settings.drop_gzip_high,
        "sources": [asdict(each) for each in dropped],
    }


def explain_gzip(report: Mapping[str, Any] | None) -> list[str]:
    """A report in sentences, one for each source with long documents; none without a report."""
    if report is None:
        return []
    what = f"of {report['long_from']:,} tokens or more"
    without = [each["source"] for each in report["sources"] if not each["long_documents"]]
    sentences = [
        f"Of {counted(each['long_documents'], 'document')} {what} of source {each['source']!r}, "
        f"{each['low_documents']:,} with a gzip ratio below {each['lowest']:.4g} and {each['high_documents']:,} above "
        f"{each['highest']:.4g} were dropped ({each['low_tokens']:,} and {each['high_tokens']:,} tokens)."
        for each in report["sources"]
        if each["long_documents"]
    ]
    if without:
        names = ", ".join(map(repr, without))
        sentences.append(f"Without a document {what}, so that gzip ratios drop nothing: {names}.")
    return sentences
