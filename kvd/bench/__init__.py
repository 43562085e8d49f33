"""Measurements of kvd as its users would see them, beside what the machine can do, in one run."""
