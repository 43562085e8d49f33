"""A laboratory for vLLM with kvd: tiny models, pinned servers and a router, for the demo, the tests and the bench.

Nothing here imports vLLM or torch but `models` and `serve`, which run as processes of their own.
"""
