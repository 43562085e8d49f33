"""Turns of conversations: a decode engine keeps an answer, and the next turn's prefill engine pulls what it can use."""
