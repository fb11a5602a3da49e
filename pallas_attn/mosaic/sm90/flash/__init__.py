"""The prefill kernel for Hopper. In reading order: schedule (list of work, and how programs take it), kernel (launch,
producer, consumers, output), split (keys cut into parts, and their merge), config (settings).
"""
