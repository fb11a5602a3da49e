"""Sizes of Triton kernels by card: the one table, by how much shared memory a thread block may have.

Those of prefill and of latents for Hopper are the fastest of about a hundred that were timed on an H100. On other cards
nothing was timed: there they are chosen so that no configuration spills, and each program has a tile of keys and values
on its way while it uses another.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_attn.runtime.device import Device

SMALL_SHARED_BYTES = 100 * 1024
"""A100, H100 and B200 have more for a thread block; sm86, sm89 and sm120 have 99 KiB."""

STAGES = 3
"""A page table's entries are loaded one step before the keys and values that they name, and those one before their use:
with 2 stages the second would wait for the first, and only 5 hold two tiles.
"""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """Sizes of an attention kernel.

    Attributes:
      rows: query rows of a program, a power of two from 16 on.
      tokens: tokens of a step, a power of two from 16 on.
      width: columns, padded to a power of two.
      warps, stages: as Triton has them.
      programs: programs that a multiprocessor has registers and shared memory for.
      max_registers: of a thread; None for as many as the assembler takes.
      bare_steps: whether steps that need no mask are taken by themselves, which takes registers.
    """

    rows: int
    tokens: int
    width: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None
    bare_steps: bool = False

    def programs_side_by_side(self, card: Device, rows: int) -> int:
        """Programs that follow a plan at a time, each with a block for every tile of so many rows.

        Raises:
          NotImplementedError: the card does not tell how many multiprocessors it has.
        """
        if card.multiprocessors is None:
            raise NotImplementedError(
                f"needs to know how many multiprocessors there are, and {card.name} does not tell"
            )
        return max(1, self.programs * card.multiprocessors // -(-rows // self.rows))


def power_of_two(n: int, at_least: int = 16) -> int:
    """The next power of two, `at_least` so much: what tiles of tensor cores are made of."""
    return max(at_least, 1 << (n - 1).bit_length())


def has_small_shared_memory(card: Device) -> bool:
    """Whether a thread block has no more than 99 KiB, or nobody knows."""
    return (card.shared_bytes_per_block or 0) <= SMALL_SHARED_BYTES


def has_e4m3(card: Device) -> bool:
    """Whether the card has instructions for float8_e4m3fn."""
    return card.capability is not None and card.capability >= (8, 9)


def decode_tile(card: Device, rows: int, head_dim: int, cache_bytes: int, *, tree: bool) -> TritonTile:
    """Tile of decode attention.

    Args:
      rows: query rows that share keys.
      head_dim: columns of keys, and of values.
      cache_bytes: bytes of a stored value. 8-bit ones become 16-bit ones in registers, of which there are few.
      tree: whether drafts have a mask.
    """
    width = power_of_two(head_dim)
    small, quantised = has_small_shared_memory(card), cache_bytes == 1
    fits = rows <= 16 and not tree if quantised else rows <= 32 or not tree
    tokens = 64 if fits and width <= (64 if small or quantised else 128) else 32
    rows = min(power_of_two(rows), 64 if tokens == 64 else 32)
    many = rows * width > (2048 if tree else 4096) or (small and rows == 64)
    warps = 8 if many or (quantised and width > 128) else 4
    # A multiprocessor has 65,536 registers, a thread up to 255. The smallest tiles take up to 168.
    programs = 1 if warps == 8 else 3 if tokens * width <= 4096 and rows == 16 else 2
    return TritonTile(rows, tokens, width, warps, STAGES, programs, None if programs == 3 and cache_bytes > 1 else 255)


def latent_tile(card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool, tree: bool) -> TritonTile:
    """Tile of decode attention over latents, whose columns are key and value.

    Wide ones leave few registers: with more tokens, or more rows a warp, the compile gate sees spills. On Hopper tiles
    of 64 rows and 64 tokens spill up to 200 bytes and yet were the fastest by far (docs/kernels/triton.md).

    Args:
      rows: query rows of a sequence.
      latent_dim: columns of the value.
      rope_dim: rotated columns, which the key has besides.
      quantised: whether latents are in 8 bits.
      tree: whether drafts have a mask.
    """
    width = power_of_two(latent_dim)
    if quantised:
        return TritonTile(16, 16 if tree else 32, width, warps=8, stages=2, programs=1, max_registers=255)
    stages = 2 if tree else STAGES
    if rows <= 16:
        warps = 8 if tree or width + rope_dim > 576 or card.capability == (8, 0) else 4
        programs = 1 if warps == 8 or has_small_shared_memory(card) else 2
        return TritonTile(16, 32, width, warps, 2 if programs == 1 else stages, programs, max_registers=255)
    if card.capability == (9, 0) and rows % 64 == 0 and not tree:  # for which Hopper has instructions
        tokens = 64 if width + rope_dim <= 576 else 32
        return TritonTile(64, tokens, width, warps=8, stages=2, programs=1, max_registers=255, bare_steps=True)
    if has_small_shared_memory(card):
        stages = 2
    return TritonTile(32, 16 if tree else 32, width, warps=8, stages=stages, programs=1, max_registers=255)


def sparse_tile(card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool) -> TritonTile:
    """Tile of attention to chosen latents, which are gathered one by one; other arguments are those of `latent_tile`.

    Args:
      rows: heads.
    """
    width = power_of_two(latent_dim)
    if card.capability == (9, 0) and rows % 64 == 0:  # for which Hopper has instructions
        tokens = 32 if quantised or width + rope_dim > 576 else 64
        return TritonTile(64, tokens, width, warps=8, stages=2, programs=1, max_registers=255)
    if quantised:
        tokens = 64 if card.capability == (9, 0) else 32 if has_e4m3(card) else 16
        return TritonTile(16, tokens, width, warps=8, stages=2, programs=1, max_registers=255)
    return latent_tile(card, min(rows, 32), latent_dim, rope_dim, quantised=False, tree=False)


@dataclasses.dataclass(frozen=True)
class IndexTile:
    """Sizes of the kernel that scores index keys.

    Attributes:
      queries: of a tile, which share keys; a power of two.
      heads: of a product, a power of two from 16 on.
      tokens: keys of a step, a power of two from 16 on.
      warps, stages: as Triton has them.
      programs: programs that a multiprocessor has registers and shared memory for.
      max_registers: of a thread; None for as many as the assembler takes.
    """

    queries: int
    heads: int
    tokens: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None

    def programs_side_by_side(self, card: Device) -> int:
        """Programs that run at the same time."""
        return self.programs * (card.multiprocessors or 128)

    @staticmethod
    def programs_of_tiles(card: Device) -> int:
        """Programs that share keys tile by tile: several for each multiprocessor, since some of them have fewer."""
        return 4 * (card.multiprocessors or 128)


def index_tile(
    card: Device, num_tokens: int, num_sequences: int, num_heads: int, dim: int, *, quantised: bool, tree: bool
) -> IndexTile:
    """Tile of scores of index keys.

    Args:
      dim: columns of a key.
      quantised: whether keys are in 8 bits, which become 16 in registers.
      tree: whether tokens have a mask.
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
    """Sizes of a kernel for attention of many queries.

    Attributes:
      rows: query rows of a program, a power of two from 16 on.
      tokens: tokens of a step, a power of two from 16 on.
      warps, stages: as Triton has them.
      bare_steps: whether steps that need no mask are taken by themselves, which takes registers.
      max_registers: of a thread; None for as many as the assembler takes.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    bare_steps: bool = False
    max_registers: int | None = 255

    def heads(self, group: int) -> int:
        """Heads of a group that a program takes: as many as have a row, in blocks of about one size."""
        return -(-group // -(-group // self.rows))


MOST_ROWS = 128
"""Query rows of a program, at most."""


def flash_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Tile of attention of many queries: the largest one that the registers hold.

    Args:
      rows: query rows that share keys, on average.
      head_dim: columns of keys or of values, whichever are more.
      demanding: whether keys are scaled or scores capped, which takes registers.
    """
    width = power_of_two(head_dim)
    if card.capability == (9, 0):
        # Two programs of 64 rows beside each other hide each other's softmax; wider heads leave room for one.
        measured: dict[str, Any] = {"bare_steps": True, "max_registers": None}
        if width <= 128:
            return FlashTile(rows=64, tokens=64, warps=4, stages=2 if width > 64 else 3, **measured)
        if not demanding:
            return FlashTile(MOST_ROWS, tokens=32, warps=8, stages=3, **measured)
    by_warpgroup = card.capability is not None and card.capability[0] == 10  # whose operands need no registers
    if demanding and (width > 128 or by_warpgroup):  # tensor memory is read back beside what is scaled
        return FlashTile(rows=32, tokens=32, warps=4, stages=2)
    if width > 128:
        return FlashTile(MOST_ROWS if by_warpgroup else 64, tokens=32, warps=8, stages=2)
    if rows <= 64 or (demanding and not by_warpgroup):
        spacious = not demanding and (width <= 64 or by_warpgroup)
        return FlashTile(rows=64, tokens=64 if spacious else 32, warps=4, stages=2)
    return FlashTile(MOST_ROWS, tokens=64 if width <= 64 or by_warpgroup else 32, warps=8, stages=2)
