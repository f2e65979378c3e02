"""Random numbers as functions of their use, such as (seed, epoch, sample), never of who draws them.

A number depends only on its key (which starts with a `vocabulary.RandomStream`), so any process, worker or restart gets
the same bits. The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014), chained over the words. It is our own because a resumed run must not depend on NumPy's stream, which
may change between releases. About 10 ns a word, vectorised over whole batches. Not for cryptography.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Uint64s = NDArray[np.uint64]

# SplitMix64's increment (the odd integer nearest to 2^64 / golden ratio) and the two multipliers of its finaliser.
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

# Four suffice for large ranges. For 3 to 64, as in the last window of a lane, four leave a bias that a chi-square test
# sees in 40,000 keys, six leave less, eight none.
_FEISTEL_ROUNDS = 8


def mix(value: Uint64s) -> Uint64s:
    """The finaliser of SplitMix64: a bijection of 64-bit words in which every input bit affects every output bit."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * MULTIPLIERS[0]
        value = (value ^ (value >> np.uint64(27))) * MULTIPLIERS[1]
    return value ^ (value >> np.uint64(31))


def hash_words(*words: ArrayLike) -> Uint64s:
    """Hash words (integers or integer arrays, broadcast together) to 64 bits; their order matters."""
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = mix((state ^ np.asarray(word).astype(np.uint64)) + INCREMENT)
    return state


def uniforms(*words: ArrayLike, draws: int) -> NDArray[np.float64]:
    """Draw uniform float64 in [0, 1), [n, draws]; row i depends only on the i-th key (scalars or arrays [n])."""
    key = hash_words(*words)[:, None]
    bits = hash_words(key, np.arange(draws, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: ArrayLike, *, size: ArrayLike, key: ArrayLike) -> NDArray[np.int64]:
    """Map `index` through a keyed random permutation of [0, size), elementwise over arrays [n], in constant memory.

    A balanced Feistel network over the smallest even number of bits that holds `size`, cycle-walked into the range
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): at most four steps on average.
    """
    index, size, key = np.broadcast_arrays(*(np.asarray(each, dtype=np.uint64) for each in (index, size, key)))
    bits = np.frexp((size - np.uint64(1)).astype(np.float64))[1]  # exact bit length: sizes stay below 2^53
    half_bits = np.maximum((bits + 1) // 2, 1).astype(np.uint64)
    value = index.copy()
    outside = np.ones(value.shape, dtype=bool)
    while outside.any():
        value[outside] = _feistel(value[outside], half_bits=half_bits[outside], key=key[outside])
        outside = value >= size
    return value.astype(np.int64)


def _feistel(value: Uint64s, *, half_bits: Uint64s, key: Uint64s) -> Uint64s:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = value >> half_bits, value & mask
    for round_number in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (hash_words(key, np.uint64(round_number), right) & mask)
    return (left << half_bits) | right
