"""Tile sizes of Triton kernels for each card.

Tiles of prefill and latent kernels for Hopper are the fastest of about 100 candidates timed on an H100. Tiles for other
cards have not been timed. They are chosen so that no kernel spills registers and each program loads the next tile of
keys and values while it computes with the current tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_attn.runtime.device import Device

SMALL_SHARED_BYTES = 100 * 1024
"""A thread block has at most 99 KiB of shared memory on sm86, sm89 and sm120, and more on A100, H100 and B200."""

STAGES = 3
"""Pipeline stages. Page-table entries are loaded one step before keys and values, which are loaded one step before use.

With 2 stages, loads of keys and values would wait for the page-table entries. Two tiles in flight would take 5 stages.
"""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """Tile of an attention kernel.

    Attributes:
      rows: query rows of a program; a power of two, at least 16.
      tokens: tokens of a step; a power of two, at least 16.
      width: columns, padded to a power of two.
      warps, stages: `num_warps` and `num_stages` of Triton.
      programs: programs that fit on a multiprocessor at the same time.
      max_registers: maximum registers of a thread; None leaves the choice to the assembler.
      bare_steps: whether steps that need no mask run in a separate loop, which needs more registers.
    """

    rows: int
    tokens: int
    width: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None
    bare_steps: bool = False

    def concurrent_programs(self, card: Device, rows: int) -> int:
        """Number of plan programs that run at the same time, if each has a block for every tile of `rows` query rows.

        Raises:
          NotImplementedError: the number of multiprocessors is unknown.
        """
        if card.multiprocessors is None:
            raise NotImplementedError(
                f"needs to know how many multiprocessors there are, and {card.name} does not tell"
            )
        return max(1, self.programs * card.multiprocessors // -(-rows // self.rows))


def power_of_two(n: int, at_least: int = 16) -> int:
    """Smallest power of two that is at least n and `at_least`. Tensor-core tiles have at least 16 rows and columns."""
    return max(at_least, 1 << (n - 1).bit_length())


def has_small_shared_memory(card: Device) -> bool:
    """Whether a thread block has at most 99 KiB of shared memory, or an unknown amount."""
    return (card.shared_bytes_per_block or 0) <= SMALL_SHARED_BYTES


def has_e4m3(card: Device) -> bool:
    """Whether the card has instructions for float8_e4m3fn."""
    return card.capability is not None and card.capability >= (8, 9)


def decode_tile(card: Device, rows: int, head_dim: int, cache_bytes: int, *, tree: bool) -> TritonTile:
    """Tile of decode attention.

    Args:
      rows: query rows that share keys.
      head_dim: columns of keys and of values.
      cache_bytes: bytes of a stored value. The conversion of 8-bit values to 16 bits needs registers.
      tree: whether there is a draft mask.
    """
    width = power_of_two(head_dim)
    small, quantised = has_small_shared_memory(card), cache_bytes == 1
    fits = rows <= 16 and not tree if quantised else rows <= 32 or not tree
    tokens = 64 if fits and width <= (64 if small or quantised else 128) else 32
    rows = min(power_of_two(rows), 64 if tokens == 64 else 32)
    many = rows * width > (2048 if tree else 4096) or (small and rows == 64)
    warps = 8 if many or (quantised and width > 128) else 4
    # A multiprocessor has 65,536 registers, a thread up to 255. The smallest tiles need up to 168 per thread.
    programs = 1 if warps == 8 else 3 if tokens * width <= 4096 and rows == 16 else 2
    return TritonTile(rows, tokens, width, warps, STAGES, programs, None if programs == 3 and cache_bytes > 1 else 255)


def latent_tile(card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool, tree: bool) -> TritonTile:
    """Tile of decode attention over latents, which are both keys and values.

    Wide latents leave few registers. More tokens, or more rows per warp, would spill. On Hopper, tiles of 64 rows and
    64 tokens spill up to 200 bytes per thread, but were the fastest of all timed tiles (docs/kernels/triton.md).

    Args:
      rows: query rows of a sequence.
      latent_dim: columns of the value.
      rope_dim: rotated columns of the key, in addition to the latent columns.
      quantised: whether latents are 8-bit.
      tree: whether there is a draft mask, a window or a soft cap, which need registers.
    """
    width = power_of_two(latent_dim)
    if quantised:
        return TritonTile(16, 16 if tree else 32, width, warps=8, stages=2, programs=1, max_registers=255)
    stages = 2 if tree else STAGES
    if rows <= 16:
        warps = 8 if tree or width + rope_dim > 576 or card.capability == (8, 0) else 4
        programs = 1 if warps == 8 or has_small_shared_memory(card) else 2
        return TritonTile(16, 32, width, warps, 2 if programs == 1 else stages, programs, max_registers=255)
    if card.capability == (9, 0) and rows % 64 == 0 and not tree:  # wgmma multiplies 64 rows
        tokens = 64 if width + rope_dim <= 576 else 32
        return TritonTile(64, tokens, width, warps=8, stages=2, programs=1, max_registers=255, bare_steps=True)
    if has_small_shared_memory(card):
        stages = 2
    return TritonTile(32, 16 if tree else 32, width, warps=8, stages=stages, programs=1, max_registers=255)


def sparse_tile(card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool) -> TritonTile:
    """Tile of attention to selected latents, which are gathered one by one.

    Args:
      rows: query heads.
      latent_dim, rope_dim, quantised: as for `latent_tile`.
    """
    width = power_of_two(latent_dim)
    if card.capability == (9, 0) and rows % 64 == 0:  # wgmma multiplies 64 rows
        tokens = 32 if quantised or width + rope_dim > 576 else 64
        return TritonTile(64, tokens, width, warps=8, stages=2, programs=1, max_registers=255)
    if quantised:
        tokens = 64 if card.capability == (9, 0) else 32 if has_e4m3(card) else 16
        return TritonTile(16, tokens, width, warps=8, stages=2, programs=1, max_registers=255)
    return latent_tile(card, min(rows, 32), latent_dim, rope_dim, quantised=False, tree=False)


@dataclasses.dataclass(frozen=True)
class IndexTile:
    """Tile of the kernel that scores index keys.

    Attributes:
      queries: queries of a tile, which share loaded keys; a power of two.
      heads: index heads of one matrix product; a power of two, at least 16.
      tokens: keys of a step; a power of two, at least 16.
      warps, stages: `num_warps` and `num_stages` of Triton.
      programs: programs that fit on a multiprocessor at the same time.
      max_registers: maximum registers of a thread; None leaves the choice to the assembler.
    """

    queries: int
    heads: int
    tokens: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None

    def concurrent_programs(self, card: Device) -> int:
        """Number of programs that run at the same time."""
        return self.programs * (card.multiprocessors or 128)

    @staticmethod
    def programs_of_tiles(card: Device) -> int:
        """Number of programs for tiles of several queries: 4 per multiprocessor, because programs have unequal work."""
        return 4 * (card.multiprocessors or 128)


def index_tile(
    card: Device, num_tokens: int, num_sequences: int, num_heads: int, dim: int, *, quantised: bool, tree: bool
) -> IndexTile:
    """Tile of the kernel that scores index keys.

    Args:
      dim: columns of a key.
      quantised: whether keys are 8-bit. Their conversion to 16 bits needs registers.
      tree: whether there is a draft mask.
    """
    queries = min(16, power_of_two(-(-num_tokens // max(1, num_sequences)), 1))
    by_integers = quantised and not has_e4m3(card)
    wide = power_of_two(dim) > 128
    timed = card.capability == (9, 0) and not wide
    few = queries == 1 or wide or by_integers or (num_heads > 64 and (quantised or not timed))
    programs = 2 if not timed or num_heads > 64 else 4 if quantised and queries == 1 else 3
    return IndexTile(
        queries,
        heads=min(32 if queries == 1 and (num_heads > 64 or (wide and by_integers)) else 64, power_of_two(num_heads)),
        tokens=64 if few else 128,
        warps=8 if wide else 4,
        stages=3 if queries == 1 and not wide else 2,
        programs=programs,
        max_registers=120 if programs == 4 else None if timed and not (tree and queries > 1) else 255,
    )


@dataclasses.dataclass(frozen=True)
class FlashTile:
    """Tile of the kernel for attention of many queries.

    Attributes:
      rows: query rows of a program; a power of two, at least 16.
      tokens: tokens of a step; a power of two, at least 16.
      warps, stages: `num_warps` and `num_stages` of Triton.
      bare_steps: whether steps that need no mask run in a separate loop, which needs more registers.
      max_registers: maximum registers of a thread; None leaves the choice to the assembler.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    bare_steps: bool = False
    max_registers: int | None = 255

    def heads(self, group: int) -> int:
        """Number of heads of a group in a program: the group in equal blocks of at most `rows` heads."""
        return -(-group // -(-group // self.rows))


MOST_ROWS = 128
"""Maximum number of query rows of a program."""


def flash_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Tile of attention of many queries: the largest tile that fits into registers.

    Args:
      rows: average number of query rows that share keys.
      head_dim: columns of keys or of values, the larger number.
      demanding: whether keys are scaled or scores are capped, which needs registers.
    """
    width = power_of_two(head_dim)
    if card.capability == (9, 0):
        # Two programs of 64 rows per multiprocessor overlap softmax with products. Wider heads have room for one.
        measured: dict[str, Any] = {"bare_steps": True, "max_registers": None}
        if width <= 128:
            return FlashTile(rows=64, tokens=64, warps=4, stages=2 if width > 64 else 3, **measured)
        if not demanding:
            return FlashTile(MOST_ROWS, tokens=32, warps=8, stages=3, **measured)
    by_warpgroup = card.capability is not None and card.capability[0] == 10  # tcgen05 operands need no registers
    if demanding and (width > 128 or by_warpgroup):  # results from tensor memory need registers
        return FlashTile(rows=32, tokens=32, warps=4, stages=2)
    if width > 128:
        return FlashTile(MOST_ROWS if by_warpgroup else 64, tokens=32, warps=8, stages=2)
    if rows <= 64 or (demanding and not by_warpgroup):
        spacious = not demanding and (width <= 64 or by_warpgroup)
        return FlashTile(rows=64, tokens=64 if spacious else 32, warps=4, stages=2)
    return FlashTile(MOST_ROWS, tokens=64 if width <= 64 or by_warpgroup else 32, warps=8, stages=2)
