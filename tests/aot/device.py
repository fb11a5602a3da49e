"""Descriptions of GPUs, with which XLA and Mosaic GPU compile on a machine without a GPU."""

from __future__ import annotations

import jax
from jax.experimental import topologies

# Properties of the GPUs in the text format of XLA's GpuTargetConfigProto, as their drivers report them. The version
# fields are necessary: without them, XLA records no custom call, loop or conditional into a CUDA graph.
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
"""Maximum bytes of shared memory of a thread block on an H200 or B200 (227 KiB)."""

MULTIPROCESSOR_SHARED_MEMORY, BLOCK_SHARED_MEMORY = 233472, 1024
"""Bytes of shared memory of a multiprocessor, and bytes that CUDA reserves for each thread block."""

MULTIPROCESSOR_REGISTERS = 65536

TMEM_COLUMNS = 512
"""Number of columns of the tensor memory of a B200 multiprocessor."""


def described(card: str) -> jax.Device:
    """Return a jax device that can only be compiled for, with the properties of `CARDS[card]`.

    A process can compile for one architecture only, because Mosaic GPU sets the target of the assembler once, for the
    first kernel.
    """
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=CARDS[card]).devices[0]
