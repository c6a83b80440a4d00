"""Pages that are generated from the family cards and the nodes: `make pages`.

The English locale, the help pages of the family nodes, and the model tables of README and the ComfyUI guide. Prose is
written by hand in `locales/<language>/help.json` and `locales/zh/nodeDefs.json`; tests/test_pages.py compares every
generated file with the one in the tree.
"""
