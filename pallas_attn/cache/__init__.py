"""Cache management on the host in plain Python: contents and owners of pages."""

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
