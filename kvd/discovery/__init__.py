"""Which daemons to meet ahead of the first transfer: a file, DNS. Whom to trust, the allow-list alone says."""
