"""Descriptions of cards, which the gate compiles for without having them."""

from __future__ import annotations

import jax
from jax.experimental import topologies

# Properties of an H200 as its driver reports them, for XLA and Mosaic GPU. Without the version fields, XLA records no
# custom call, loop or conditional into a CUDA graph.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.1"
  runtime_version: "12.9.1"
  compile_time_toolkit_version: "12.9.1"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""

B200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 148
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 8000000000000
  l2_cache_size: 132644864
  clock_rate_ghz: 1.965
  device_memory_size: 191000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.1"
  runtime_version: "12.9.1"
  compile_time_toolkit_version: "12.9.1"
  cuda_compute_capability { major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA B200"
"""

L4 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 102400
  shared_memory_per_block_optin: 101376
  threads_per_core_limit: 1536
  core_count: 58
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 300000000000
  l2_cache_size: 50331648
  clock_rate_ghz: 2.04
  device_memory_size: 24000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.1"
  runtime_version: "12.9.1"
  compile_time_toolkit_version: "12.9.1"
  cuda_compute_capability { major: 8 minor: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA L4"
"""

CARDS = {"H200": H200, "B200": B200, "L4": L4}

MAX_SHARED_MEMORY = 232448
"""Maximum shared memory of a thread block on an H200 or B200 [bytes], 227 KiB."""

MULTIPROCESSOR_SHARED_MEMORY, BLOCK_SHARED_MEMORY = 233472, 1024
"""Shared memory of a multiprocessor, and the part that the system reserves for each thread block [bytes]."""

MULTIPROCESSOR_REGISTERS = 65536

TMEM_COLUMNS = 512
"""Number of tensor memory columns of a B200 multiprocessor."""


def described(card: str) -> jax.Device:
    """Return a device for compilation only, described by the entry of `CARDS`.

    A process can compile for one architecture only, because the first kernel fixes the target of the assembler.
    """
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=CARDS[card]).devices[0]
