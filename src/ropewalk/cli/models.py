"""``ropewalk models``: show which model families are supported, and why others are not."""

from __future__ import annotations

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, show_result
from ropewalk.models.support import ModelsSettings


def models(settings: ModelsSettings, *, as_json: JsonFlag = False) -> None:
    """Show which model families are supported, and why others are not.

    The answer comes from a table in the package. No model is loaded.
    """
    from ropewalk.models.support import supported
    from ropewalk.reporting.models import describe_support

    result = supported(settings)
    show_result(result, as_json, lambda found: describe_support(found, settings))


app = make_command(models, "models", "ropewalk models qwen3")
