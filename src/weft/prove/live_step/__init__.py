"""Proof of a step of the run that trains: its own batch, parameters and sizes against the plain chain of whole blocks.

Note [Live step]
    After the gradients of a step are reduced and before they are used, the ranks compute the same
    step again as one device does: whole sequences go through the plain blocks, which hold whole
    parameters. No parallel code takes part but sums over all ranks. The work is divided by
    sequences: each rank takes some of them, block after block, forward and backward, so no rank
    holds more than one whole block and its own inputs of every block. A block's parameters are
    gathered from the first rank that holds each entry, for the forward, and again for the backward
    where a rank had no memory for the graphs of the block.

    Compared are the initial values by their definition, replicas of parameters (to the bit), the
    output of every block of every sequence (by random projections, so that no rank holds the
    outputs of others), loads of experts, the number of targets, the loss, the gradient norm, and
    every entry of every gradient on every rank that holds it. Bounds are those of other proofs: see
    Note [Bounds]. The perturbed runs are made of the first micro-batches alone, and their spread is
    scaled up to the whole step. Where blocks of the layout compute what plain ones do, the bound is
    the rounding of the sums alone, and perturbed runs are made only if a number is outside it.
"""
