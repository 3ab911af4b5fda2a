"""Private: states that contractions keep between calls, and their collections.

`statistics` has those of calibrations, `learned_parameters` and `gradient_statistics`
those that training changes, `second_moment` and `shared_moments` those of GPTQ;
`stored_statistics` reads them from checkpoints, and `fixed_scale` replaces them. Read
`statistics` first.
"""
