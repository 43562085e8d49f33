"""Daemons to connect to before the first transfer, from a file and DNS. The allow-list alone says whom to trust."""
