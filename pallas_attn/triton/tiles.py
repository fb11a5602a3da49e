"""Tile sizes of Triton kernels, by GPU.

A program processes a tile: a block of query rows and, in each step of its loop, a block of tokens (keys and values). A
query row is one query head of one query token.

Tiles of prefill and MLA kernels for Hopper are the fastest of about 100 candidates that were timed on an H100. Tiles
for other GPUs have not been timed. They are chosen so that no kernel spills registers, and so that a program loads the
keys and values of the next step during the current step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_attn.runtime.device import Device

SMALL_SHARED_BYTES = 100 * 1024
"""Threshold between GPUs with small shared memory (sm86, sm89 and sm120: at most 99 KiB per thread block) and GPUs with
more (A100, H100, B200).
"""

STAGES = 3
"""Triton's number of pipeline stages (loop steps in flight) for decode kernels.

Keys and values are loaded one step before they are used, and their page ids one step earlier. With 2 stages, loads of
keys and values would wait for the page ids. Loading keys and values two steps ahead would take 5 stages.
"""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """Tile of a decode kernel.

    Attributes:
      rows: query rows of a program; a power of two, at least 16.
      tokens: tokens per step; a power of two, at least 16.
      width: columns of a head or latent, padded to a power of two.
      warps, stages: `num_warps` and `num_stages` of Triton.
      programs: programs that fit on a multiprocessor at the same time.
      max_registers: maximum registers per thread; None leaves the choice to the assembler.
      bare_steps: whether steps whose scores need no mask run in a separate loop, which takes more registers.
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
        """Return the number of CTAs for a decode plan: the number that runs at the same time on the GPU.

        A `DecodePlan` assigns pages to CTAs. In Triton, a CTA of the plan is one program for each tile of query rows.

        Args:
          card: the GPU.
          rows: query rows that read the same pages.

        Raises:
          NotImplementedError: the number of multiprocessors is unknown.
        """
        if card.multiprocessors is None:
            raise NotImplementedError(f"needs the number of multiprocessors, which is unknown for {card.name}")
        return max(1, self.programs * card.multiprocessors // -(-rows // self.rows))


def power_of_two(n: int, at_least: int = 16) -> int:
    """Return the smallest power of two that is at least `n` and at least `at_least`.

    The default is 16, because operands of `tl.dot` have at least 16 rows and columns.
    """
    return max(at_least, 1 << (n - 1).bit_length())


def has_small_shared_memory(card: Device) -> bool:
    """Return whether a thread block has at most 100 KiB of shared memory, or an unknown amount."""
    return (card.shared_bytes_per_block or 0) <= SMALL_SHARED_BYTES


def has_e4m3(card: Device) -> bool:
    """Return whether the GPU has instructions that convert float8_e4m3fn (sm89 and later)."""
    return card.capability is not None and card.capability >= (8, 9)


def decode_tile(card: Device, rows: int, head_dim: int, cache_bytes: int, *, tree: bool) -> TritonTile:
    """Return the tile of `paged_decode`.

    Args:
      card: the GPU.
      rows: query rows that read the same keys: the query heads per KV head times the queries.
      head_dim: columns of a key or of a value, the larger number.
      cache_bytes: bytes per number in the cache. The conversion of 8-bit numbers to 16 bits takes registers.
      tree: whether the call has a draft mask, which takes registers.
    """
    width = power_of_two(head_dim)
    small, quantised = has_small_shared_memory(card), cache_bytes == 1
    if width > 256:
        # Per 16 query rows, the output takes 32 registers per thread. 32 tokens of 16-bit keys and values take 64 KiB
        # of shared memory.
        tile_rows = 16 if rows <= 16 or quantised else 32
        tokens = 16 if tile_rows == 32 or (quantised and tree) else 32
        return TritonTile(tile_rows, tokens, width, warps=8, stages=STAGES, programs=1, max_registers=255)
    fits = rows <= 16 and not tree if quantised else rows <= 32 or not tree
    tokens = 64 if fits and width <= (64 if small and not quantised else 128) else 32
    rows = min(power_of_two(rows), 64 if tokens == 64 else 32)
    many = rows * width > (2048 if tree else 4096) or (small and rows == 64)
    warps = 8 if many or (quantised and width > 128) else 4
    # A multiprocessor has 65,536 registers: enough for 2 programs of 4 warps with 255 registers per thread, or for 1
    # program of 8 warps. The smallest tiles of 16-bit caches take up to 168 registers per thread, so 3 programs of 4
    # warps fit.
    programs = 1 if warps == 8 else 3 if tokens * width <= 4096 and rows == 16 and not quantised else 2
    return TritonTile(rows, tokens, width, warps, STAGES, programs, None if programs == 3 else 255)


def latent_tile(card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool, tree: bool) -> TritonTile:
    """Return the tile of `mla_decode`. A latent is both key and value.

    Latents are wide, so the output of a tile takes most of the registers. Tiles with more tokens, or more rows per
    warp, would spill. On Hopper, tiles of 64 rows and 64 tokens spill up to 200 bytes per thread, but were the fastest
    of all timed tiles (docs/kernels/triton.md).

    Args:
      card: the GPU.
      rows: query rows of a sequence: heads times queries.
      latent_dim: columns of a latent.
      rope_dim: columns of the rotated key, which a key has in addition to the latent.
      quantised: whether latents are 8-bit.
      tree: whether the call has a draft mask, a window or a soft cap, which take registers.
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


def sparse_tile(
    card: Device, rows: int, latent_dim: int, rope_dim: int, *, quantised: bool, small_groups: bool = False
) -> TritonTile:
    """Return the tile of `mla_sparse`: attention to selected latents, which are gathered token by token.

    Args:
      card: the GPU.
      rows: query heads; each query token selects its own latents.
      latent_dim, rope_dim, quantised: as for `latent_tile`.
      small_groups: whether 8-bit latents have scales that are powers of two. Tiles of 64 rows would spill 500 bytes.
    """
    width = power_of_two(latent_dim)
    if small_groups:
        return TritonTile(16 if rows <= 16 else 32, 32, width, warps=8, stages=2, programs=1, max_registers=255)
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
      queries: query tokens of a tile, which share loaded keys; a power of two.
      heads: index heads per matrix product; a power of two, at least 16.
      tokens: keys per step; a power of two, at least 16.
      warps, stages: `num_warps` and `num_stages` of Triton.
      programs: programs that fit on a multiprocessor at the same time.
      max_registers: maximum registers per thread; None leaves the choice to the assembler.
    """

    queries: int
    heads: int
    tokens: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None

    def concurrent_programs(self, card: Device) -> int:
        """Return the number of programs that run at the same time; for 128 multiprocessors if the number is unknown."""
        return self.programs * (card.multiprocessors or 128)

    @staticmethod
    def programs_of_tiles(card: Device) -> int:
        """Return the number of programs for tiles of several queries, 4 per multiprocessor.

        More programs than run at the same time balance the load, because the programs have unequal numbers of keys.
        """
        return 4 * (card.multiprocessors or 128)


def index_tile(
    card: Device, num_tokens: int, num_sequences: int, num_heads: int, dim: int, *, quantised: bool, tree: bool
) -> IndexTile:
    """Return the tile of the kernel that scores index keys.

    Args:
      card: the GPU.
      num_tokens, num_sequences: packed query tokens, and sequences.
      num_heads: index heads.
      dim: columns of an index key.
      quantised: whether keys are 8-bit. Their conversion to 16 bits takes registers.
      tree: whether the call has a draft mask, which takes registers.
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
    """Tile of the prefill kernel (`triton.flash`).

    Attributes:
      rows: query rows of a program; a power of two, at least 16.
      tokens: tokens per step; a power of two, at least 16.
      warps, stages: `num_warps` and `num_stages` of Triton.
      bare_steps: whether steps whose scores need no mask run in a separate loop, which takes more registers.
      max_registers: maximum registers per thread; None leaves the choice to the assembler.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    bare_steps: bool = False
    max_registers: int | None = 255

    def heads(self, group: int) -> int:
        """Return how many query heads a program processes, at most `rows`.

        The `group` query heads of a KV head are divided into blocks of about equal size.
        """
        return -(-group // -(-group // self.rows))


MOST_ROWS = 128
"""Maximum number of query rows per program of the prefill kernel."""


def _wide_flash_tile(card: Device, *, demanding: bool) -> FlashTile:
    """Return the tile of the prefill kernel for more than 256 columns. With 8 warps, the output takes 64 registers per
    thread and 32 query rows.

    Fewer tokens take less shared memory, and fewer registers for scores and weights.
    """
    if demanding and not has_e4m3(card):  # the conversion of float8_e4m3fn takes registers
        return FlashTile(rows=16, tokens=32, warps=8, stages=2)
    if not demanding and card.capability is not None and card.capability[0] in (9, 10):
        return FlashTile(rows=64, tokens=16, warps=8, stages=2)  # wgmma and tcgen05 multiply 64 rows
    return FlashTile(rows=32, tokens=16 if has_small_shared_memory(card) else 32, warps=8, stages=2)


def flash_tile(card: Device, rows: int, head_dim: int, *, demanding: bool) -> FlashTile:
    """Return the tile of the prefill kernel: the fastest measured tile on Hopper, elsewhere the largest tile that fits
    into registers.

    Args:
      card: the GPU.
      rows: average number of query rows that read the same keys.
      head_dim: columns of a key or of a value, the larger number.
      demanding: whether the cache has scales or the scores a soft cap, which take registers.
    """
    width = power_of_two(head_dim)
    if width > 256:
        return _wide_flash_tile(card, demanding=demanding)
    if card.capability == (9, 0):
        # Two programs of 64 rows fit on a multiprocessor: one multiplies while the other computes softmax. With heads
        # of more than 128 columns, one program fits.
        measured: dict[str, Any] = {"bare_steps": True, "max_registers": None}
        if width <= 128:
            return FlashTile(rows=64, tokens=64, warps=4, stages=2 if width > 64 else 3, **measured)
        if not demanding:
            return FlashTile(MOST_ROWS, tokens=32, warps=8, stages=3, **measured)
    # On sm100, tcgen05 instructions read operands from shared memory and write results to tensor memory.
    by_warpgroup = card.capability is not None and card.capability[0] == 10
    if demanding and (width > 128 or by_warpgroup):  # scales and caps need the results in registers
        return FlashTile(rows=32, tokens=32, warps=4, stages=2)
    if width > 128:
        return FlashTile(MOST_ROWS if by_warpgroup else 64, tokens=32, warps=8, stages=2)
    if rows <= 64 or (demanding and not by_warpgroup):
        spacious = not demanding and (width <= 64 or by_warpgroup)
        return FlashTile(rows=64, tokens=64 if spacious else 32, warps=4, stages=2)
    return FlashTile(MOST_ROWS, tokens=64 if width <= 64 or by_warpgroup else 32, warps=8, stages=2)
