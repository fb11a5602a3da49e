"""Building blocks of Mosaic GPU kernels that do not depend on the architecture."""
