"""Code shared by Mosaic GPU kernels: on any architecture here, on Hopper in `sm90`, on data-center Blackwell in
`sm100`.
"""
