"""How long tests wait for what takes a moment on an idle machine."""

PATIENCE = 120.0
"""Seconds: a test fails for being wrong, not for a busy machine. Less than a test's own limit, so that what it says
itself is seen."""

MOMENT = 60.0
"""Seconds for what happens within the test's own process, and for one step of many: a pure test's limit is 120."""

NEVER_LOST = {"heartbeat": "20", "claim_ttl": "60"}
"""Settings of a daemon that loses no peer and no claim to a machine that gives it no processor for some seconds. The
defaults (1 s and 5 s) are for tests about losing them."""
