"""Reads between daemons of one host, without a network: kvd maps the peer's pools and copies."""
