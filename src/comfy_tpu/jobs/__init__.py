"""Jobs: requests as data, a ledger of their states, and workers that carry them out.

Whoever submits and follows jobs imports `request`, `sources`, `ledger`, `folder`, `driver`: none of them needs jax.
`execution` runs a model, in this process or in a Ray actor.
"""
