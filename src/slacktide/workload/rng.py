"""Random streams by name, so that arrivals, lengths and classes of one seed never share or disturb each other."""

from __future__ import annotations

import numpy as np

from slacktide.errors import InputError


def stream(seed: object, name: str) -> np.random.Generator:
    """The generator called `name` of a seed: a SeedSequence child whose spawn key is the name's bytes.

    Two names are independent, and drawing more from one leaves the other alone (common random numbers).
    Raises InputError for a seed that is no whole number from 0 on.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"seed {seed!r}: expected a whole number from 0 on")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(seed), spawn_key=tuple(name.encode()))))
