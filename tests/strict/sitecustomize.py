"""Watches the strict provider in every process that a test starts; see strict_guard.py."""

import os

if os.environ.get("STRICT_GUARD"):
    import strict_guard

    strict_guard.watch()
