"""What can end the demo early."""

from __future__ import annotations

from kvstow.errors import KvstowError


class DemoError(KvstowError):
    """The demo cannot go on; the message holds what the server said. Show it and stop."""
