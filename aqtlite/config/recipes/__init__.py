"""Private: presets, functions that build configs, composed of what users have, too.

`training` has those of training, `post_training` those of trained models, and
`block_formats` those of small floats in blocks; `catalogue` lists them all with what
they cost. Read `training` first.
"""
