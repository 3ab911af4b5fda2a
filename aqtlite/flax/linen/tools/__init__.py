"""Private: what is done to Linen models beside quantizing, converting and serving them.

Statistics (`calibrate`), adapters, biases, caches, lookups in tables, parameters folded
or widened. Each file stands for itself. Read `calibrate` first.
"""
