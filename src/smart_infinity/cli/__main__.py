"""``python -m smart_infinity.cli`` is the command ``smart-infinity``."""

from smart_infinity.cli import app

app()
