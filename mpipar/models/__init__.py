"""Models: a list of blocks each, written once for every layout.

A model declares all its blocks, hands each pipeline stage its share and gives memory only to the parameters of this
rank. What lives here is built from the layers of `nn/` and `parallel/`; the training step lives in `engine/`.
"""
