"""Readers and writers of quantized files of other libraries: private, one format each.

A reader plans weights from the shapes of tensors and the config of a checkpoint; a
weight is read when it is asked for. Integers, scales and zero points are handed over as
they are stored. Read `base` first.
"""
