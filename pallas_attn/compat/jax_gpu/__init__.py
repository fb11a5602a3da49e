"""Replacement for the modules `paged_attention` and `decode_attention` of `jax.experimental.pallas.ops.gpu`.

JAX 0.12 deprecates both modules. The functions here have the signatures, layouts and outputs of jax's functions:

    from pallas_attn.compat.jax_gpu import decode_attention, paged_attention

The residuals (l, m) of `decode_attention` differ: here l is 1 and m is the LSE. In jax, m is the maximum of the scores.
Both pairs have the same m + log(l). docs/coming_from.md lists all differences.
"""

from pallas_attn.compat.jax_gpu import decode_attention as decode_attention
from pallas_attn.compat.jax_gpu import paged_attention as paged_attention
