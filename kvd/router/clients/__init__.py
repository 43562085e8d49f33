"""The clients' side: the port, connections, and requests as they come in."""
