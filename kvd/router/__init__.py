"""A router for prefill and decode servers with OpenAI's HTTP interface. It reads no ticket: it passes parameters on."""
