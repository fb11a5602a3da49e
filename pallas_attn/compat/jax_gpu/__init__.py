"""Replacement for the modules `paged_attention` and `decode_attention` of `jax.experimental.pallas.ops.gpu`.

JAX 0.12 deprecates both modules. Their functions keep their signatures, layouts and results here:

    from pallas_attn.compat.jax_gpu import decode_attention, paged_attention
"""

from pallas_attn.compat.jax_gpu import decode_attention as decode_attention
from pallas_attn.compat.jax_gpu import paged_attention as paged_attention
