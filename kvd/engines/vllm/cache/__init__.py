"""The cache of a vLLM worker: what lies where in it, what its bytes mean, and its place in the daemon's pool."""
