"""Decoding: sequences, sampling, drafters, verification and the speculative step."""
