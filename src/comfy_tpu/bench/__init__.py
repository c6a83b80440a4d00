"""Speed and error of this package beside diffusers, measured in one run; and the page made from the results.

`runner` starts a process for every part (`worker`), because each needs a clean device and its own XLA settings; the
parts are in modules of their own and return `results.Row`s. A new part is one module, and a line in `job` and in
`worker`. A model and its sizes come from the family's card and its `reference.py` (`models`).
"""
