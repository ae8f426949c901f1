"""Random numbers that depend on what they are for and on nothing else: no rank, no order, no batch."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything printable; equal parts give equal seeds on every machine and rank."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_generator(*parts: object) -> torch.Generator:
    """A random generator of its own for one trajectory, candidate or judgment."""
    return torch.Generator().manual_seed(derive_seed(*parts))
