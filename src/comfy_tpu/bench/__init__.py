"""Speed and error of this package beside diffusers, measured in one run; and the page that is made of the figures.

`runner` starts a process for every part (`worker`), because each wants a clean device and its own XLA settings; the
parts are in modules of their own and hand back `results.Row`s. A new part is one module, and a line
in `job` and in `worker`. `vae_runner` does the same for the ways in which one VAE can decode.
"""
