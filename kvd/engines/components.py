"""What the parts of a cache are called that engines of several kinds have."""

from typing import Final

KV: Final = "kv"
"""Keys and values of attention heads; with `kvd.plan.KEYS` or `VALUES` behind it, one of the two."""

LATENT: Final = "latent"
"""What latent attention keeps of a token: compressed keys and values, and behind them the rotated part of the key."""
