"""Servers and daemons that die and stand still at random under load: `python -m tests.vllm.chaos`."""
