"""Code shared by Mosaic GPU kernels for data-center Blackwell (B200), whose tensor cores are programmed by tcgen05."""
