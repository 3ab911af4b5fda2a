"""Private: numbers of quantized contractions while training, and what stands out.

`tap` runs a training step with what its contractions note (`contraction.tapped`) as
further outputs; `records` holds them as arrays, tables and plots, and `diagnose` says
what stands out, with a remedy. Read `tap` first.
"""
