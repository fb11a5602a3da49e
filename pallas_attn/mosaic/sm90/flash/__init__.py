"""The prefill kernel for Hopper. In reading order: schedule (which work there is, and who does it), kernel (how it is
done), split (keys cut into parts, and merged), config (settings).
"""
