"""``python -m kvstow.cli``: the command without its installed script."""

from kvstow.cli.main import app

app()
