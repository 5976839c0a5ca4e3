"""Measurements of this machine: its storage, the update phase, and the kernels.

Machines drift: whatever is compared here is measured in turns within one run.
"""
