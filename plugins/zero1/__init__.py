"""The sharded update: owners hold optimizer state, update their shards, and spread parameters.

ZeRO stage 1 (Rajbhandari et al., SC'20). Sums go to owners inside backward, ``step()`` updates what
this rank owns, and parameters come while the next forward pass runs (DeAR, Zhang et al., ICDCS'23).
Everything is a collective, in the order of the script, which is the same on all ranks: before each,
they say what they are about to do (agreement.py). No thread of ours takes part.
"""
