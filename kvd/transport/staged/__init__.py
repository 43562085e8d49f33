"""Pools in GPUs' memory, read from other hosts by way of host memory: a layer over the network's transport."""
