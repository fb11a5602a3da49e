"""Kernels of other projects as baselines. Each baseline runs the same cases as our kernels, in most cases on the same
arrays.
"""
