"""Speed and error of this package beside diffusers, measured in one run; and the page made from the results.

`runner` starts a process for every part, because each needs a clean device and its own XLA settings; the parts are in
modules of their own and emit `results.Row`s. A new part is one function, and a line in `job` and in `runner`. A model
and its sizes come from the family's card and its `reference.py` (`models`).
"""
