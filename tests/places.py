"""Where things lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
CONFIGS = ROOT / "tests" / "configs"
"""The ``config.json`` of published checkpoints."""
SHARED = ROOT.parent / "shared"
"""Models and texts that lie beside the checkout on some machines; tests that read them skip where they are not."""
