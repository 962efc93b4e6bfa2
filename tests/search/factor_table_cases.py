"""A factor table as a search leaves it."""

from ropewalk.search import Factors
from ropewalk.search.factor_table import HeldOut

BASELINES = {"pi": None, "ntk": 8.0, "yarn": 8.5}
SEARCH = {
    "objective": "perplexity",
    "algorithm": "evolution",
    "seed": 0,
    "budget": 9,
    "racing": True,
    "documents": 2,
    "text": "a.jsonl",
    "documents_sha256": "a",
    "largest": 5.0,
    "start_tokens": (0,),
    "device": "cpu",
    "dtype": "float32",
    "candidates": 3,
    "seconds": 1.0,
}


def searched(best=7.0, held_out=7.5, baselines=BASELINES, **search):
    judged = HeldOut(documents=1, documents_sha256="b", best=held_out, baselines=BASELINES)
    return Factors(
        model={"name": "tiny", "rotary_dim": 4, "rope_theta": 1e4, "original_max_position_embeddings": 512},
        target_length=2048,
        long_factor=(1.0, 2.0),
        attention_factor=1.1,
        provenance={"kind": "search", "source": "evolution"},
        best={"objective": best, "rescale_factors": (1.0, 2.0)},
        baselines=baselines,
        forwards=9,
        search={**SEARCH, **search},
        held_out=judged if held_out else None,
    )
