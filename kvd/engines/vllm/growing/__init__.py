"""Offers that grow while their prefill goes on: the decode engine is asked at the same time as the prefill engine."""
