"""Private: adapters beside weights: their parameters, products and merging.

`low_rank` computes an adapter's product and `magnitude` that of DoRA; `adapter_init`
starts adapters from values of weights, and `merging` adds them to these. Read
`low_rank` first.
"""
