"""Management of a paged KV cache on the host, in plain Python: which sequences own which pages, and which pages a new
prompt can reuse. The pages themselves are on the device; this package handles their ids only.
"""

from pallas_attn.cache.errors import CacheError, InconsistentCache, OutOfPages, PageError
from pallas_attn.cache.group_pools import GroupPools
from pallas_attn.cache.head_page_pool import HeadPagePool
from pallas_attn.cache.page_pool import PagePool
from pallas_attn.cache.prefix_cache import Prefix, PrefixCache

__all__ = [
    "CacheError",
    "GroupPools",
    "HeadPagePool",
    "InconsistentCache",
    "OutOfPages",
    "PageError",
    "PagePool",
    "Prefix",
    "PrefixCache",
]
