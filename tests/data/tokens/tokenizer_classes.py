"""What AutoTokenizer makes of a model's type. To write the table again:

python -m tests.data.tokens.tokenizer_classes > src/ropewalk/data/tokens/tokenizer_classes.json
"""

import json
from typing import Any

from transformers.models.auto import tokenization_auto as auto

KEEP = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "MistralCommonBackend")
"""Classes that keep ``tokenizer.json`` as it is; that of mistral-common where this is not installed."""


def table() -> dict[str, Any]:
    """The table of the installed transformers."""
    registered: dict[str, list[str]] = {}
    for model_type, name in auto.TOKENIZER_MAPPING_NAMES.items():
        if name is not None:
            registered.setdefault("" if name in KEEP else name.removesuffix("Fast"), []).append(model_type)
    return {
        "registered": {name: sorted(types) for name, types in sorted(registered.items())},
        "incorrect": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
    }


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
